// What kernels call, compiled once for all of them.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

#include "elements.h"
#include "threads.h"

sim::Index threadIdx, blockIdx, gridDim, blockDim;

namespace sim {

void run(const Launch& launch) {
  Turns all(launch.cluster * launch.threads);
  turns = &all;
  gridDim = launch.grid, blockDim = {launch.threads, 1, 1};
  for (unsigned block = 0; block < gridDim.x * gridDim.y; block += launch.cluster) {
    Cluster its(launch.cluster, launch.threads, {block % gridDim.x, block / gridDim.x, 0});
    all.run(its.threads, [&] { launch.kernel(launch.parameters); });
  }
}

[[noreturn]] void unknown(const char* instruction) {
  std::fprintf(stderr, "the simulation does not know %s\n", instruction);
  std::abort();
}

uint8_t* dynamic_shared() { return self->block->memory + kFirstAddress; }
uint32_t address_of(const void* pointer) {
  return uint32_t(static_cast<const uint8_t*>(pointer) - self->block->memory) | self->block->rank << kRankShift;
}
uint8_t* at(Block& block, uint32_t address) { return block.memory + (address & ((1u << kRankShift) - 1)); }
Block& block_of(uint32_t address) { return *self->block->cluster->blocks[address >> kRankShift]; }
uint8_t* at(uint32_t address) { return at(block_of(address), address); }

// Warps.

unsigned lane() { return self->lane(); }
unsigned block_threads() { return self->block->threads; }
void sync_warp() { warp().meeting.wait(32); }

unsigned long long exchange_bits(unsigned long long bits, unsigned from) {
  Warp& own = warp();
  own.values[self->lane()] = bits;
  own.meeting.wait(32);
  const uint64_t found = own.values[from % 32];
  own.meeting.wait(32);
  return found;
}

void elect(unsigned& is_elected) { is_elected = self->lane() == 0; }

unsigned ballot(bool value) {
  Warp& own = warp();
  own.values[self->lane()] = value;
  own.meeting.wait(32);
  unsigned bits = 0;
  for (unsigned lane = 0; lane < 32; ++lane) bits |= unsigned(own.values[lane]) << lane;
  own.meeting.wait(32);
  return bits;
}

void sync_named(int barrier, int threads) { self->block->named[size_t(barrier)].wait(unsigned(threads)); }
void sync_cluster() {
  Cluster& cluster = *self->block->cluster;
  cluster.meeting.wait(unsigned(cluster.blocks.size()) * self->block->threads);
}
void cluster_rank(uint32_t& rank) { rank = self->block->rank; }

// Barriers in shared memory: 64 bits of them.

struct BarrierWord {
  uint64_t phase : 1, pending : 15, arrivals : 15, unused : 1;
  int64_t bytes : 32;
};
static_assert(sizeof(BarrierWord) == 8);

template <class Change>
void change(Block& block, uint32_t address, const Change& change) {
  uint8_t* place = at(block, address);
  auto* word = reinterpret_cast<BarrierWord*>(place);
  change(*word);
  if (word->pending == 0 && word->bytes == 0) {
    word->phase ^= 1, word->pending = word->arrivals;
    turns->wake(block.cluster->at_barriers[place]);
  }
}

// Another block of the cluster, whose memory is given to others as soon as it has ended.
Block& still_there(Block& block) {
  if (block.running == 0) unknown("something that is given to a block that has ended");
  return block;
}

void barrier_init(uint32_t address, int arrivals) {
  BarrierWord word{};
  word.pending = word.arrivals = unsigned(arrivals);
  std::memcpy(at(address), &word, sizeof word);
}
void arrive(Block& block, uint32_t address, uint32_t bytes = 0) {
  change(block, address, [=](BarrierWord& word) {
    if (word.pending == 0) unknown("an arrival too many");
    word.bytes += bytes, --word.pending;
  });
  turns->yield();
}
void barrier_arrive(uint32_t address) { arrive(block_of(address), address); }
void barrier_arrive_at(uint32_t address, uint32_t block) { arrive(still_there(*self->block->cluster->blocks[block]), address); }
void barrier_expect(uint32_t address, uint32_t bytes) { arrive(block_of(address), address, bytes); }
void barrier_wait(uint32_t address, uint32_t parity) {
  const auto* word = reinterpret_cast<BarrierWord*>(at(address));
  Waiting& there = block_of(address).cluster->at_barriers[at(address)];
  while (word->phase == parity) turns->wait(there, "a barrier at", address);
}

// The bulk copy engine takes any of its jobs next, when it likes.

// What build.py puts in the place of an encoded tensor map.
struct Map {
  char* data;
  int64_t element_bytes, rows, cols, pitch, box_rows, box_cols, swizzle;
  int64_t box_bytes() const { return box_rows * box_cols * element_bytes; }
};

// Of 0, 32, 64 or 128 bytes, for `mode` from 0 to 3.
uint32_t swizzled(uint32_t address, int mode = 3) { return address ^ ((address >> 7 & ((1u << mode) - 1)) << 4); }

// Walks over the elements of a box: in shared memory, in global memory (null outside of the matrix).
template <class Visit>
void over_box(const Map& map, uint32_t address, int x, int y, uint8_t* shared, const Visit& visit) {
  const uint32_t first = address & ((1u << kRankShift) - 1);
  for (int64_t r = 0; r < map.box_rows; ++r) {
    for (int64_t c = 0; c < map.box_cols; ++c) {
      const uint32_t place = first + uint32_t((r * map.box_cols + c) * map.element_bytes);
      const bool is_inside = y + r >= 0 && y + r < map.rows && x + c >= 0 && x + c < map.cols;
      visit(shared + swizzled(place, int(map.swizzle)),
            is_inside ? map.data + (y + r) * map.pitch + (x + c) * map.element_bytes : nullptr);
    }
  }
}

void load(const Map& map, Block* block, uint32_t target, uint32_t barrier, int x, int y) {
  turns->later([=] {
    over_box(map, target, x, y, block->memory, [&](uint8_t* shared, const char* global) {
      if (global) std::memcpy(shared, global, size_t(map.element_bytes));
      else std::memset(shared, 0, size_t(map.element_bytes));
    });
    change(still_there(*block), barrier, [&](BarrierWord& word) { word.bytes -= map.box_bytes(); });
  });
}

void check_box(const Map& map, uint32_t address, int x) {
  const uint32_t alignment = map.swizzle ? 1024 : 128;
  if (address % alignment) unknown("a box at an address that is not aligned");
  if (x * map.element_bytes % 16) unknown("a box that begins between two times 16 bytes");
}

void copy_box(uint32_t target, const void* map, uint32_t barrier, int x, int y) {
  Map its;
  std::memcpy(&its, map, sizeof its);
  check_box(its, target, x);
  load(its, self->block, target, barrier, x, y);
}

void copy_box_to_many(uint32_t target, const void* map, uint32_t barrier, int x, int y, uint16_t blocks) {
  Map its;
  std::memcpy(&its, map, sizeof its);
  check_box(its, target, x);
  for (auto& block : self->block->cluster->blocks) {
    if (blocks >> block->rank & 1) load(its, block.get(), target, barrier, x, y);
  }
}

template <bool kAdds>
void store_box(const void* map, uint32_t source, int x, int y) {
  Map its;
  std::memcpy(&its, map, sizeof its);
  check_box(its, source, x);
  if (x < 0 || y < 0) unknown("a box of the output that begins in front of the matrix");  // an illegal instruction
  Block* block = self->block;
  self->open_stores.push_back([=] {
    over_box(its, source, x, y, block->memory, [&](const uint8_t* shared, char* global) {
      if (!global) return;
      if constexpr (kAdds) {
        float sum, value;
        std::memcpy(&sum, global, 4), std::memcpy(&value, shared, 4);
        sum += value;
        std::memcpy(global, &sum, 4);
      } else {
        std::memcpy(global, shared, size_t(its.element_bytes));
      }
    });
  });
}

template void store_box<true>(const void*, uint32_t, int, int);
template void store_box<false>(const void*, uint32_t, int, int);

void commit(Work& open, std::vector<Work>& committed) {
  committed.push_back(std::move(open));
  open.clear();
}
void finish(std::vector<Work>& committed, size_t pending) {
  while (committed.size() > pending) {
    for (auto& work : committed.front()) work();
    committed.erase(committed.begin());
  }
}

void commit_stores() { commit(self->open_stores, self->stores); }
void wait_stores(int pending) { finish(self->stores, size_t(pending)); }

// Shared memory, by address.

void load_pair(float& x, float& y, uint32_t address) {
  std::memcpy(&x, at(address), 4), std::memcpy(&y, at(address) + 4, 4);
}
void store_pair(uint32_t address, float x, float y) {
  std::memcpy(at(address), &x, 4), std::memcpy(at(address) + 4, &y, 4);
}
void store_matrices(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  const uint32_t words[4] = {a, b, c, d}, lane = self->lane();
  for (uint32_t m = 0; m < 4; ++m) {
    const uint32_t row = exchange(address, m * 8 + lane / 4);
    std::memcpy(at(row) + lane % 4 * 4, &words[m], 4);
  }
}
void load_turned_matrices(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d, uint32_t address) {
  uint32_t* const words[4] = {&a, &b, &c, &d};
  const uint32_t lane = self->lane();
  for (uint32_t m = 0; m < 4; ++m) {
    for (uint32_t half = 0; half < 2; ++half) {
      const uint32_t row = exchange(address, m * 8 + lane % 4 * 2 + half);
      std::memcpy(reinterpret_cast<char*>(words[m]) + half * 2, at(row) + lane / 4 * 2, 2);
    }
  }
}

void load_word(uint16_t& word, uint32_t address) { std::memcpy(&word, at(address), 2); }
void load_word(uint32_t& word, uint32_t address) { std::memcpy(&word, at(address), 4); }
void load_words(uint32_t& a, uint32_t& b, uint32_t address) {
  std::memcpy(&a, at(address), 4), std::memcpy(&b, at(address) + 4, 4);
}
void load_words(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d, uint32_t address) {
  uint32_t words[4];
  std::memcpy(words, at(address), 16);
  a = words[0], b = words[1], c = words[2], d = words[3];
}
void store_words(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  const uint32_t words[4] = {a, b, c, d};
  std::memcpy(at(address), words, 16);
}

// Tensor cores: an operand is read when somebody waits for the product.

struct Descriptor {
  uint32_t first, leading, stride;
  explicit Descriptor(uint64_t bits)
      : first(field(bits)), leading(field(bits >> 16)), stride(field(bits >> 32)) {}
  static uint32_t field(uint64_t bits) { return uint32_t(bits & 0x3FFF) << 4; }
};

constexpr int kSummed = 32;  // bytes that an instruction sums over
using Terms = std::array<double, kSummed + 1>;

// The values of an operand at one place of what is kept.
template <class Type>
void read(const uint8_t* memory, const Descriptor& its, int kept, bool is_turned, double* values) {
  const int step = is_turned ? 128 : Type::kBytes, eight = is_turned ? int(its.stride) : 8 * Type::kBytes;
  const uint32_t first = is_turned ? its.first + kept / 64 * its.leading + kept % 64 * Type::kBytes
                                   : its.first + kept / 8 * its.stride + kept % 8 * 128;
  for (int k = 0; k < kSummed / Type::kBytes; ++k) {
    values[k] = Type::value(memory + swizzled(first + uint32_t(k / 8 * eight + k % 8 * step)));
  }
}

double power_of_two(int exponent) { return std::bit_cast<double>(uint64_t(exponent + 1023) << 52); }

double sum(const Terms& terms, int count) { return std::accumulate(terms.begin(), terms.begin() + count, 0.0); }

// As tensor cores add FP8: what lies 13 bits behind the point of the largest term is cut off from all.
double sum_of_14_bits(const Terms& terms) {
  uint64_t largest = 0;
  for (const double term : terms) largest = std::max(largest, std::bit_cast<uint64_t>(std::fabs(term)));
  if (largest == 0) return 0.0;
  const int exponent = int(largest >> 52) - 1023;  // none is so small that it has another
  if (exponent == 1024) return sum(terms, kSummed + 1);
  const double inverse = power_of_two(13 - exponent);
  int total = 0;
  for (const double term : terms) total += int(term * inverse);
  return total * power_of_two(exponent - 13);
}

// The values of a row that four threads side by side hold; `half`: whether it is the one 8 rows further.
template <class Type>
void read_registers(const Thread* four, size_t product, int half, double* values) {
  for (int k = 0; k < 16; ++k) {
    const uint32_t word = *four[k % 8 / 2].fragments[product][size_t(k / 8 * 2 + half)];
    const uint16_t code = uint16_t(word >> k % 2 * 16);
    values[k] = Type::value(reinterpret_cast<const uint8_t*>(&code));
  }
}

// What one thread adds to its part of a product.
struct Product {
  using Read = void(const uint8_t*, const Descriptor&, int, bool, double*);
  using ReadRegisters = void(const Thread*, size_t, int, double*);

  const uint8_t* memory;
  int row, col;     // its first of both sides
  int count, each;  // sums, and products of each: as many as bytes where these are FP8
  Read *left, *right;
  ReadRegisters* registers;  // of a left side that is none in memory
  const Thread* four;        // who hold it
  size_t number;             // of the product, among those of such sides
  std::vector<Operand> operands;

  void add() const {
    const Operand* rest = operands.data() + count;
    const bool can_turn = operands.size() == size_t(count + 5);
    double rows[2][kSummed], its[kSummed];
    for (int h = 0; h < 2; ++h) {
      if (registers) {
        registers(four, number, h, rows[h]);
      } else {
        left(memory, Descriptor(rest[0].number), row + 8 * h, can_turn && rest[3].number, rows[h]);
      }
    }
    if (registers) rest += 3;
    const bool turns = registers ? rest[3].number : can_turn && rest[4].number;
    for (int pair = 0; pair < count / 2; ++pair) {
      const int i = pair / 2 * 4 + pair % 2;  // of the first row; two behind is that of the second
      right(memory, Descriptor(rest[1].number), i / 4 * 8 + col + i % 2, turns, its);
      for (int h = 0; h < 2; ++h) add(rows[h], its, rest[2].number, *operands[size_t(i + 2 * h)].sum);
    }
  }

  void add(const double* row, const double* other, bool adds, float& total) const {
    Terms terms;
    for (int k = 0; k < each; ++k) terms[size_t(k)] = row[k] * other[k];
    terms[size_t(each)] = adds ? double(total) : 0.0;
    total = float(each == kSummed ? sum_of_14_bits(terms) : sum(terms, each + 1));
  }
};

template <class First, class Second>
void multiply_late(int width, const Operand* operands, int count) {
  const int row = int(self->number / 32 % 4 * 16 + self->lane() / 4), col = int(self->lane() % 4 * 2);
  Product product{self->block->memory, row, col, width / 2, kSummed / First::kBytes, read<First>, read<Second>,
                  nullptr, self - self->lane() % 4, self->fragments.size(), {operands, operands + count}};
  if (count == width / 2 + 7) {
    const Operand* const its = operands + width / 2;
    self->fragments.push_back({its[0].word, its[1].word, its[2].word, its[3].word});
    product.registers = read_registers<First>;
  }
  self->open_products.push_back([=] { product.add(); });
}
template void multiply_late<bf16, bf16>(int, const Operand*, int);
template void multiply_late<f16, f16>(int, const Operand*, int);
template void multiply_late<e4m3, e4m3>(int, const Operand*, int);
template void multiply_late<e4m3, e5m2>(int, const Operand*, int);
template void multiply_late<e5m2, e4m3>(int, const Operand*, int);
template void multiply_late<e5m2, e5m2>(int, const Operand*, int);

void commit_products() { commit(self->open_products, self->products); }

// An instruction of the whole warp: when one thread goes on, the products of all are done.
void wait_products(int pending) {
  warp().meeting.wait(32);
  finish(self->products, size_t(pending));
  warp().meeting.wait(32);
}

}  // namespace sim

unsigned __reduce_max_sync(unsigned, unsigned value) {
  unsigned largest = 0;
  for (unsigned lane = 0; lane < 32; ++lane) largest = std::max(largest, sim::exchange(value, lane));
  return largest;
}
