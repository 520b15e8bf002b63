/* Counts the CUDA driver calls of the process that loads it, whoever makes them, by name: what a framework copies,
 * allocates and launches between start and stop, and on which stream it launches. It uses CUPTI's callbacks, declared
 * here as far as they are needed, so that no header is; the caller says where CUPTI is. One counter a process, and no
 * other profiler beside it.
 *
 *   cc -shared -fPIC -o driver_calls.so driver_calls.c -ldl -lpthread
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

enum { DRIVER_API = 1, ENTER = 0, CALLS = 4096, KERNELS = 512, NAME = 256 };

/* The head of CUpti_CallbackData. */
struct callback_data {
    int site;
    const char* function;
    const void* parameters;
    void* result;
    const char* symbol; /* of a launch: the kernel; of other calls nothing */
};

/* The heads of what cuLaunchKernel and cuLaunchKernelEx are called with, the second through a pointer. */
struct launch {
    void* function;
    unsigned grid_block_and_shared[7];
    void* stream;
};
struct launch_config {
    unsigned grid_block_and_shared[7];
    void* stream;
};

typedef void (*callback_function)(void*, int, uint32_t, const struct callback_data*);

static int (*subscribe)(void**, callback_function, void*);
static int (*unsubscribe)(void*);
static int (*enable_domain)(uint32_t, void*, int);
static int (*callback_name)(int, uint32_t, const char**);

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static void* subscriber;
static long counts[CALLS];
static char kernels[KERNELS][NAME];
static void* streams[KERNELS];
static int kernel_count;

static void* stream_of(const struct callback_data* data) {
    if (strncmp(data->function, "cuLaunchKernelEx", 16) == 0) {
        return (*(const struct launch_config* const*)data->parameters)->stream;
    }
    return strncmp(data->function, "cuLaunchKernel", 14) == 0 ? ((const struct launch*)data->parameters)->stream : NULL;
}

static void note(void* unused, int domain, uint32_t call, const struct callback_data* data) {
    (void)unused;
    if (domain != DRIVER_API || data->site != ENTER || call >= CALLS) return;
    pthread_mutex_lock(&mutex);
    ++counts[call];
    if (strncmp(data->function, "cuLaunch", 8) == 0 && data->symbol != NULL && kernel_count < KERNELS) {
        strncpy(kernels[kernel_count], data->symbol, NAME - 1);
        streams[kernel_count] = stream_of(data);
        ++kernel_count;
    }
    pthread_mutex_unlock(&mutex);
}

/* Start counting. Returns NULL, or why it cannot. */
const char* driver_calls_start(const char* cupti) {
    void* library = dlopen(cupti, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) return dlerror();
    *(void**)&subscribe = dlsym(library, "cuptiSubscribe");
    *(void**)&unsubscribe = dlsym(library, "cuptiUnsubscribe");
    *(void**)&enable_domain = dlsym(library, "cuptiEnableDomain");
    *(void**)&callback_name = dlsym(library, "cuptiGetCallbackName");
    if (subscribe == NULL || unsubscribe == NULL || enable_domain == NULL || callback_name == NULL) {
        return "it has no callback interface";
    }
    memset(counts, 0, sizeof(counts));
    memset(kernels, 0, sizeof(kernels));
    kernel_count = 0;
    if (subscribe(&subscriber, note, NULL) != 0) return "it refuses a subscriber (does another profiler run?)";
    if (enable_domain(1, subscriber, DRIVER_API) != 0) {
        unsubscribe(subscriber);
        return "it refuses the driver's callbacks";
    }
    return NULL;
}

/* Stop counting and write a line "call COUNT NAME" for each function and "kernel STREAM NAME" for each launch, in
 * order. Returns NULL, or why it cannot. */
const char* driver_calls_stop(const char* path) {
    unsubscribe(subscriber);
    FILE* file = fopen(path, "w");
    if (file == NULL) return "the file cannot be written";
    for (uint32_t call = 0; call < CALLS; ++call) {
        const char* name = NULL;
        if (counts[call] == 0) continue;
        if (callback_name(DRIVER_API, call, &name) != 0 || name == NULL) name = "unknown";
        fprintf(file, "call %ld %s\n", counts[call], name);
    }
    for (int i = 0; i < kernel_count; ++i) fprintf(file, "kernel %p %s\n", streams[i], kernels[i]);
    return fclose(file) == 0 ? NULL : "the file cannot be written";
}
