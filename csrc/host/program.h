// Launches that are repeated with other addresses.
#pragma once

#include <atomic>
#include <vector>

#include "driver.h"
#include "launchable.h"

namespace te_dist {

// Where an address goes into the parameters of a launch.
struct Patch {
  size_t place;     // in bytes, of the address or of the tensor map that holds it
  size_t slot;      // which of the addresses of a run
  uint64_t offset;  // added to it
  bool is_map;
};

// A launch with all of its parameters, as they lie in memory.
struct PatchedLaunch {
  Launchable* launched;
  std::array<unsigned, 3> grid;
  std::string parameters;
  std::vector<Patch> patches;
};

class Program {
 public:
  // What is launched must outlive it.
  explicit Program(std::vector<PatchedLaunch> launches);

  // Launches all, in their order. Several threads may run a program at once.
  void run(int device, uint64_t stream, const std::vector<uint64_t>& addresses);

  // Number of the launch that the last run began last: after an exception, the one that failed.
  size_t position() const { return position_; }

 private:
  std::vector<PatchedLaunch> launches_;
  std::atomic<size_t> position_{0};
};

}  // namespace te_dist
