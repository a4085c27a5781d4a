// Assertions that what we declare, namespace `ours`, is what another header declares.
#pragma once

#include <cstddef>
#include <type_traits>

// Layouts. Every member in order, so that none is left out between two that agree.
#define SAME_SIZE(a, b) static_assert(sizeof(a) == sizeof(b) && alignof(a) == alignof(b), "size or alignment of " #b)
#define SAME_PLACE(a, member, b, theirs)                                                                    \
  static_assert(offsetof(a, member) == offsetof(b, theirs) && sizeof(a::member) == sizeof(b::theirs), \
                "place or size of " #theirs)

// Functions: as many parameters, each passed in the same way (pointers as pointers, numbers of the same size and kind).
template <class A, class B>
constexpr bool kPassedAlike = std::is_pointer_v<A> == std::is_pointer_v<B> &&
                              std::is_floating_point_v<A> == std::is_floating_point_v<B> && sizeof(A) == sizeof(B);
template <class A, class B>
constexpr bool kSame = false;
template <class R, class... A, class S, class... B>
constexpr bool kSame<R (*)(A...), S (*)(B...)> = [] {
  if constexpr (sizeof...(A) == sizeof...(B)) return kPassedAlike<R, S> && (kPassedAlike<A, B> && ...);
  return false;
}();
#define SAME_FUNCTION(name, theirs) \
  static_assert(kSame<decltype(ours::Functions::name), decltype(&theirs)>, "parameters of " #theirs)
