// What variants of every operation share. Plain C++: no CUDA in here.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tilerank.h"

namespace tilerank {

// Records the message for tilerank_last_error() and returns status. Messages name field, value and what is allowed.
__attribute__((format(printf, 2, 3))) tilerank_status refuse(tilerank_status status, const char* format, ...);

}  // namespace tilerank
