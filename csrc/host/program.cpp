#include "program.h"

#include <cstring>
#include <stdexcept>

namespace te_dist {
namespace {

constexpr size_t kMaxParameterBytes = 32764;  // of a kernel

void patch(const Patch& patch, uint64_t address, unsigned char* parameters) {
  unsigned char* place = parameters + patch.place;
  if (!patch.is_map) {
    std::memcpy(place, &address, sizeof address);
    return;
  }
  driver::TensorMap map;
  std::memcpy(&map, place, sizeof map);
  driver::check(driver::functions().replace_address(&map, reinterpret_cast<void*>(address)),
                "moving a tensor map to " + std::to_string(address));
  std::memcpy(place, &map, sizeof map);
}

void check(const PatchedLaunch& launch) {
  const size_t size = launch.parameters.size();
  if (size > kMaxParameterBytes) throw std::invalid_argument(launch.launched->label() + " has more parameters than fit");
  for (const Patch& patch : launch.patches) {
    const size_t bytes = patch.is_map ? sizeof(driver::TensorMap) : sizeof(uint64_t);
    if (bytes > size || patch.place > size - bytes) {
      throw std::invalid_argument("an address behind the parameters of " + launch.launched->label());
    }
  }
}

}  // namespace

Program::Program(std::vector<PatchedLaunch> launches) : launches_(std::move(launches)) {
  for (const PatchedLaunch& launch : launches_) check(launch);
}

void Program::run(int device, uint64_t stream, const std::vector<uint64_t>& addresses) {
  const driver::ContextGuard guard(device);
  alignas(64) unsigned char parameters[kMaxParameterBytes];
  std::vector<void*> arguments{parameters};
  for (size_t i = 0; i < launches_.size(); ++i) {
    const PatchedLaunch& launch = launches_[i];
    position_ = i;
    std::memcpy(parameters, launch.parameters.data(), launch.parameters.size());
    for (const Patch& its : launch.patches) patch(its, addresses.at(its.slot) + its.offset, parameters);
    launch.launched->launch(device, stream, launch.grid, arguments);
  }
}

}  // namespace te_dist
