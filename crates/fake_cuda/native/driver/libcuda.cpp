// A driver without a GPU: the functions of libcuda that this project calls, over the host's memory, and functions `fake_*` by
// which tests look into it. It does what CUDA's manual says, as late as that allows, and refuses what the manual forbids.
#include "calls_devices.h"
#include "calls_memory.h"
#include "calls_streams.h"
#include "calls_modules.h"
#include "calls_graphs.h"
#include "questions.h"
