"""Inline PTX as calls of C++ functions."""

from __future__ import annotations

import re

_START = re.compile(r"\basm\s+(?:volatile\s*)?\(|\basm\(")
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')

# The function of csrc's instructions, by a part of their text; the first that is found. {n} is a group of the pattern.
FUNCTIONS = [
    (r"^\s*$", "sim::nothing"),
    (r"setmaxnreg", "sim::nothing"),
    (r"fence\.", "sim::nothing"),
    (r"griddepcontrol", "sim::nothing"),
    (r"elect\.sync", "sim::elect"),
    (r"bar\.sync", "sim::sync_named"),
    (r"mbarrier\.init", "sim::barrier_init"),
    (r"mapa.*mbarrier\.arrive", "sim::barrier_arrive_at"),
    (r"mbarrier\.arrive\.expect_tx", "sim::barrier_expect"),
    (r"mbarrier\.arrive", "sim::barrier_arrive"),
    (r"mbarrier\.try_wait", "sim::barrier_wait"),
    (r"cluster_ctarank", "sim::cluster_rank"),
    (r"barrier\.cluster", "sim::sync_cluster"),
    (r"cp\.async\.bulk\.prefetch\.tensor", "sim::nothing"),
    (r"cp\.async\.bulk\.tensor.*multicast", "sim::copy_box_to_many"),
    (r"cp\.async\.bulk\.tensor.*mbarrier", "sim::copy_box"),
    (r"cp\.reduce\.async\.bulk\.tensor", "sim::store_box<true>"),
    (r"cp\.async\.bulk\.tensor", "sim::store_box<false>"),
    (r"cp\.async\.bulk\.commit_group", "sim::commit_stores"),
    (r"cp\.async\.bulk\.wait_group\.read", "sim::wait_stores"),
    (r"ld\.shared\.v2\.f32", "sim::load_pair"),
    (r"st\.shared\.v2\.f32", "sim::store_pair"),
    (r"stmatrix.*x4", "sim::store_matrices"),
    (r"ldmatrix.*x4\.trans", "sim::load_turned_matrices"),
    (r"wgmma\.fence", "sim::nothing"),
    (r"wgmma\.commit_group", "sim::commit_products"),
    (r"wgmma\.wait_group", "sim::wait_products"),
    (r"wgmma\.mma_async.*m64n(\d+)k\d+\.f32\.(\w+)\.(\w+)", "sim::multiply<{1}, sim::{2}, sim::{3}>"),
    (r"ld\.shared\.v[24]\.b32", "sim::load_words"),
    (r"ld\.shared\.b(?:16|32)", "sim::load_word"),
    (r"st\.shared\.v4\.b32", "sim::store_words"),
    (r"cvt\.rn\.satfinite\.(\w+)x2\.f32", "sim::encode_pair<sim::{1}>"),
    (r"cvt\.rn\.f16x2\.(\w+)x2", "sim::decode_pair<sim::{1}>"),
    (r"cvt\.rn\.(bf16|f16)x2\.f32", "sim::round_pair<sim::{1}>"),
    (r"cvt\.rz\.f16x2\.f32", "sim::truncate_pair"),
    (r"cvt\.rn\.(bf16|f16)\.f32", "sim::round_one<sim::{1}>"),
    (r"cvt\.f32\.f16", "sim::widen"),
    (r"rcp\.approx\.ftz\.f32", "sim::reciprocal"),
    (r"fma\.rn\.sat\.f32 %0, %1, 0f3F000000, 0fC0000000", "sim::saturated_half_less_two"),
    (r"max\.NaN\.f32", "sim::larger_or_nan"),
    (r"max\.NaN\.xorsign\.abs\.f32", "sim::larger_magnitude"),
    (r"max\.(bf16|f16)x2", "sim::larger_pair<sim::{1}>"),
    (r"max\.NaN\.xorsign\.abs\.(bf16|f16)x2", "sim::larger_magnitudes<sim::{1}>"),
    (r"max\.u16x2", "sim::larger_integers"),
    (r"mul\.rn\.(bf16|f16)x2", "sim::multiply_pair<sim::{1}>"),
    (r"prmt\.b32", "sim::permute"),
]


def without_assembly(source: str) -> str:
    """Preprocessed C++ whose asm statements are calls; what has no function here calls `sim::unknown`."""
    parts, at = [], 0
    while found := _START.search(source, at):
        end = _closing(source, found.end())
        parts += [source[at : found.start()], _call(source[found.end() : end])]
        at = end + 1
    return "".join([*parts, source[at:]])


def _closing(text: str, at: int) -> int:
    """Of the parenthesis that is open at `at`."""
    depth = 1
    while depth:
        if text[at] == '"':
            match = _STRING.match(text, at)
            assert match
            at = match.end()
            continue
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        at += 1
    return at - 1


def _call(body: str) -> str:
    """Of the text between the parentheses of an asm statement."""
    template, operands, at = "", [], 0
    is_template = True
    while at < len(body):
        if body[at] == ":":
            is_template = False
        match = _STRING.match(body, at)
        if not match:
            at += 1
            continue
        at = match.end()
        if is_template:
            template += match[1]
            continue
        opened = re.compile(r"\s*\(").match(body, at)
        if opened:  # else it is clobbered
            end = _closing(body, opened.end())
            operands.append(body[opened.end() : end])
            at = end + 1
    text = template.replace("\\n", " ")
    for pattern, name in FUNCTIONS:
        found = re.search(pattern, text)
        if found:
            groups = {str(i): group for i, group in enumerate(found.groups(), 1)}
            function = re.sub(r"\{(\d)\}", lambda place, groups=groups: groups[place[1]], name)
            return f"{function}({', '.join(operands)})"
    return f'sim::unknown("{text.split()[0] if text.split() else ""}")'
