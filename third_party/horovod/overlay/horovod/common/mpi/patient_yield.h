// Waits of Open MPI that sleep, where it was told to yield.
//
// Open MPI waits by asking again and again, in every call. With mpi_yield_when_idle
// it calls sched_yield() in between, which gives the core only to threads of the
// same session, and only where there are some: the rank uses up its share of the
// processor by waiting. Open MPI has no way to sleep, so a function of ours takes
// the place of sched_yield() in its library's table of imports.

#ifndef HOROVOD_PATIENT_YIELD_H
#define HOROVOD_PATIENT_YIELD_H

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

// Elsewhere the table has another form, or addresses in it that are relative.
#if defined(__GLIBC__) && defined(__LP64__) &&                                 \
    (defined(__x86_64__) || defined(__aarch64__))
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

namespace horovod {
namespace common {

// Yields in a wait's first 0.3 ms, and then sleeps: for an eighth of the time that
// it has taken, at most 0.5 ms. Short naps take the core from ranks that compute;
// long ones end too late.
inline int PatientYield() noexcept {
  using std::chrono::microseconds;
  using std::chrono::nanoseconds;
  using std::chrono::steady_clock;
  constexpr microseconds SPIN_TIME(300), LONGEST_NAP(500);
  constexpr int WAITED_PER_NAP = 8;
  // Two calls that are closer are taken for one wait: it takes a microsecond to find
  // nothing, and longer to pass on a large part of a message. Small messages may
  // come within one wait, each up to a nap late.
  constexpr microseconds SAME_WAIT(10);
  thread_local steady_clock::time_point began, ended;
  // Open MPI's poll reports nothing for a message over TCP that it has delivered, and
  // yields. So there is no nap in two calls running: the waiter looks in between.
  thread_local bool napped = false;
  const auto now = steady_clock::now();
  if (now - ended > SAME_WAIT) {
    began = now;
  }
  const nanoseconds waited = now - began;
  if (waited < SPIN_TIME || napped) {
    napped = false;
    std::this_thread::yield();
  } else {
    napped = true;
    const int error = errno; // which sched_yield() leaves alone
    std::this_thread::sleep_for(
        std::min<nanoseconds>(LONGEST_NAP, waited / WAITED_PER_NAP));
    errno = error;
  }
  ended = steady_clock::now();
  return 0;
}

// Called for each loaded library; changes Open MPI's.
inline int ImportPatientYield(struct dl_phdr_info* library, size_t, void*) {
  if (std::strstr(library->dlpi_name, "libopen-pal.so") == nullptr) {
    return 0;
  }
  const ElfW(Dyn)* entry = nullptr;
  for (int i = 0; i < library->dlpi_phnum; ++i) {
    if (library->dlpi_phdr[i].p_type == PT_DYNAMIC) {
      entry = reinterpret_cast<const ElfW(Dyn)*>(library->dlpi_addr +
                                                library->dlpi_phdr[i].p_vaddr);
    }
  }
  const ElfW(Rela)* imports = nullptr;
  const ElfW(Sym)* symbols = nullptr;
  const char* names = nullptr;
  size_t bytes = 0;
  for (; entry != nullptr && entry->d_tag != DT_NULL; ++entry) {
    switch (entry->d_tag) {
    case DT_JMPREL:
      imports = reinterpret_cast<const ElfW(Rela)*>(entry->d_un.d_ptr);
      break;
    case DT_PLTRELSZ:
      bytes = entry->d_un.d_val;
      break;
    case DT_SYMTAB:
      symbols = reinterpret_cast<const ElfW(Sym)*>(entry->d_un.d_ptr);
      break;
    case DT_STRTAB:
      names = reinterpret_cast<const char*>(entry->d_un.d_ptr);
      break;
    }
  }
  if (imports == nullptr || symbols == nullptr || names == nullptr) {
    return 0;
  }
  const size_t page = sysconf(_SC_PAGESIZE);
  for (size_t i = 0; i < bytes / sizeof(*imports); ++i) {
    const auto& symbol = symbols[ELF64_R_SYM(imports[i].r_info)];
    if (std::strcmp(names + symbol.st_name, "sched_yield") == 0) {
      const auto place = library->dlpi_addr + imports[i].r_offset;
      // Read-only in a library that was linked with -z now.
      if (mprotect(reinterpret_cast<void*>(place & ~(page - 1)), page,
                   PROT_READ | PROT_WRITE) == 0) {
        __atomic_store_n(reinterpret_cast<int (**)() noexcept>(place),
                         &PatientYield, __ATOMIC_RELEASE);
      }
    }
  }
  return 0;
}

// Makes Open MPI sleep where it would yield. Where it cannot be, nothing changes.
inline void SleepWhereOpenMPIYields() {
  dl_iterate_phdr(ImportPatientYield, nullptr);
}

} // namespace common
} // namespace horovod
#else
namespace horovod {
namespace common {
inline void SleepWhereOpenMPIYields() {}
} // namespace common
} // namespace horovod
#endif

#endif // HOROVOD_PATIENT_YIELD_H
