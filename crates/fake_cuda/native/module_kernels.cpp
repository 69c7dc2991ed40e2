// The kernels of a source, which stands above: those that ENTRIES lists.
#include "module.h"

#define ENTRY(NAME) {#NAME, [](void *const *from) { call(NAME, from); }, signature(NAME)},
static const Entry list[] = {
    ENTRIES
};

const Entry *const entries = list;
const std::size_t entry_count = sizeof(list) / sizeof(list[0]);
