// The kernels of a source, which stands above: those that ENTRIES lists. The driver, which is compiled once for all programs, runs them.
#include "entries.h"

#define ENTRY(NAME) {#NAME, [](const Arguments &from) { call(NAME, from); }, [] { return signature(NAME); }},
static const Entry list[] = {
    ENTRIES
};

const Entry *const entries = list;
const std::size_t entry_count = sizeof(list) / sizeof(list[0]);
const std::size_t behind = BEHIND;
