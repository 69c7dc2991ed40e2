// What a kernel takes, as letters: "r" and "w" for memory that it reads and writes, "l", "f" and "d" for numbers, "s" and a size
// for structs.
#pragma once
#include <string>
#include <type_traits>

template <class A> struct Letter {
    static std::string of() {
        if (std::is_floating_point<A>::value) return sizeof(A) == 8 ? "d" : "f";
        return std::is_integral<A>::value && sizeof(A) == 8 ? "l" : "s" + std::to_string(sizeof(A));
    }
};

template <class A> struct Letter<A *> {
    static std::string of() { return std::is_const<A>::value ? "r" : "w"; }
};

template <class... A> std::string signature(void (*)(A...)) {
    std::string letters;
    int unused[] = {0, (letters += Letter<A>::of(), 0)...};
    (void)unused;
    return letters;
}
