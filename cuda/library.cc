// What the library says about itself, and the message of the last refusal.
#include <cstdarg>
#include <cstdio>

#include "common/variant.h"

namespace tilerank {

namespace {
thread_local char last_error[512] = "";
}

tilerank_status refuse(tilerank_status status, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(last_error, sizeof(last_error), format, arguments);
    va_end(arguments);
    return status;
}

}  // namespace tilerank

int32_t tilerank_abi_version(void) { return TILERANK_ABI_VERSION; }
const char* tilerank_build_id(void) { return TILERANK_BUILD_ID; }
const char* tilerank_backend(void) { return TILERANK_BACKEND; }
const char* tilerank_archs(void) { return TILERANK_ARCHS; }
const char* tilerank_last_error(void) { return tilerank::last_error; }
