// Functions of the fake driver for tests, beside the driver's own. Mirrored in cuda/tests/support/fake.rs.
#pragma once
#include <cstddef>
#include <cstdint>

extern "C" {
// Counters of live objects and of misuse; members with `bytes` are sizes.
struct FakeCounts {
    uint64_t contexts, streams, events, buffers, pinned, modules, graphs;
    uint64_t reservations, physical, mappings;
    uint64_t bytes_used;
    // Misuse. Each of them also makes the call fail, but for `released_while_mapped`, which CUDA allows.
    uint64_t double_maps, unmaps_of_unmapped, released_while_mapped, bad_handles, bad_addresses, reservations_busy;
    // Unmaps that were called while work was queued in some stream (allowed where that work does not use the place).
    uint64_t unmaps_with_work_queued;
    uint64_t kernels_run, copies_run, maps, unmaps;
    // Physical memory that was made to be registered for remote direct access.
    uint64_t made_for_rdma;
    // Kernels that were launched as dependents, those of them that do not directly follow a kernel, and those that began before
    // the one ahead of them.
    uint64_t dependents, dependents_misplaced, begun_early;
};
void lagoon_fake_counts(FakeCounts* counts);
// The `nth` call from now on (1 is the next) of the function of this name fails with `code`; "*" is any function but
// those that release something. A later call replaces an earlier one; `nth` of 0 takes it back.
void lagoon_fake_fail(const char* function, uint64_t nth, int code);
// As `lagoon_fake_fail`, and so does every such call after it.
void lagoon_fake_fail_from(const char* function, uint64_t nth, int code);
// Bytes of device memory in all, and the size of a page. The environment variable LAGOON_FAKE_PAGE sets the latter for
// programs that cannot call this.
void lagoon_fake_memory(uint64_t bytes_max, uint64_t granularity);
// Compute capability, and bytes of shared memory that a block may ask for.
void lagoon_fake_device(int major, int minor, int shared_bytes);
// The version of CUDA that the driver supports, 1000 times the major and 10 times the minor version; dependents cannot be
// captured before 12030.
void lagoon_fake_driver(int version);
// Every kernel whose name contains this text fails with CUDA_ERROR_LAUNCH_FAILED, which every later call of the process returns,
// as after a trap on a device; an empty text takes it back. LAGOON_FAKE_TRAP and LAGOON_FAKE_CAPABILITY ("9.0") are for programs.
void lagoon_fake_trap(const char* kernels);
// Devices that are seen (all are the same one), the last byte of the first one's name, which LAGOON_FAKE_UUID sets for
// programs, and whether each can access the others' memory. LAGOON_FAKE_FAIL="cuMemMap 3 2" is `lagoon_fake_fail_from`
// for programs.
void lagoon_fake_devices(int devices, int uuid, int peers);
// Whether memory can be shared by descriptor, and registered for remote direct access; asking for what cannot be fails.
void lagoon_fake_sharing(int shareable, int rdma);
// Seeds the order in which queued work runs. 0 runs only what a wait needs, as late as can be; 1 runs everything at
// once; any other number makes a random order, which streams and events allow.
void lagoon_fake_schedule(uint64_t seed);
// Whether kernels' lanes and warps take turns in every order that the library knows, one launch after the other, or in turn only,
// which is quickest.
void lagoon_fake_turns(int all);
// The library of kernels that modules find from now on; it must stay.
void lagoon_fake_kernels(const char* path);
// For a library beside the driver; see driver.cpp.
int lagoon_fake_enqueue(void* stream, void (*run)(void*), void (*drop)(void*), void* context);
int lagoon_fake_usable(uint64_t address, uint64_t bytes);
}
