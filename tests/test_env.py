"""Environment variables: read when asked for, checked, documented."""

import pwd
import runpy
from pathlib import Path

import pytest

from te_dist import env


def test_unset_and_empty_variables_have_their_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("RANK", "")
    assert (env.WORLD_SIZE.get(), env.RANK.get()) == (1, 0)


def test_a_variable_is_read_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert env.WORLD_SIZE.get() == 8


@pytest.mark.parametrize(
    ("variable", "text"),
    [(env.RANK, "-1"), (env.RANK, "two"), (env.UNMEASURED_KERNELS, "yes")],
    ids=["negative", "word", "no flag"],
)
def test_wrong_text_is_refused_with_name_value_and_remedy(
    variable: env.Variable, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable.name, text)
    with pytest.raises(ValueError, match=rf"{variable.name}='{text}'.*unset it or correct it"):
        variable.get()


def test_a_folder_of_the_users_home_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/of/mine")
    monkeypatch.setenv("TE_DIST_KERNEL_CACHE", "~/kernels")
    assert env.KERNEL_CACHE.get() == Path("/home/of/mine/kernels")
    monkeypatch.delenv("TE_DIST_KERNEL_CACHE")
    assert env.KERNEL_CACHE.get() == Path("/home/of/mine/.cache/te_dist/kernels")


def test_a_home_is_not_needed_before_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at import; where it is unknown the message names what to set."""

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.delenv("HOME")
    monkeypatch.delenv("TE_DIST_KERNEL_CACHE", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    cache = runpy.run_path(str(env.__file__))["KERNEL_CACHE"]
    with pytest.raises(ValueError, match=r"TE_DIST_KERNEL_CACHE, unset, means '~/.*no home .* for ~, .*; set it"):
        cache.get()
    monkeypatch.setenv("TE_DIST_KERNEL_CACHE", "/kernels")
    assert cache.get() == Path("/kernels")


def test_every_variable_is_named_once_and_says_what_it_means() -> None:
    variables = env.variables()
    assert len({variable.name for variable in variables}) == len(variables)
    assert all(variable.meaning.endswith(".") for variable in variables)
