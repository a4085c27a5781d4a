// What is launched with parameters that lie in memory: a compiled kernel, or a product of a library.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace te_dist {

class Launchable {
 public:
  virtual ~Launchable() = default;

  // One pointer to each argument's bytes, in the order of the parameters. Several threads may launch it at once.
  virtual void launch(int device, uint64_t stream, std::array<unsigned, 3> grid, std::vector<void*>& arguments) = 0;

  // How messages call it.
  virtual const std::string& label() const = 0;
};

}  // namespace te_dist
