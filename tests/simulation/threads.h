// Threads of a cluster take turns on one thread of the host: each goes on until it waits for others, or gives them
// something to go on with. Who is next, of those who can go on and the jobs of the copy engine, is drawn from a fixed
// seed: what does not wait for what it needs fails here, and fails again when it is run again.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <array>
#include <csetjmp>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "device.h"

namespace sim {

struct Block;

// A thread's part of a side that lies in registers.
using Fragment = std::array<const uint32_t*, 4>;

// What is done when somebody waits for it.
using Work = std::vector<std::function<void()>>;

struct Thread {
  Block* block = nullptr;
  unsigned number = 0;
  std::jmp_buf place;  // where it goes on, once it has begun
  bool has_begun = false;
  const char* waits_at = nullptr;
  unsigned detail = 0;
  Work open_products, open_stores;
  std::vector<Fragment> fragments;  // of every product whose first side lies in registers
  std::vector<Work> products, stores;  // as they were committed

  unsigned lane() const { return number % 32; }
};

inline Thread* self = nullptr;  // whose turn it is

using Waiting = std::vector<Thread*>;

class Turns {
 public:
  explicit Turns(size_t threads) : stacks_(new char[threads * kStackBytes]) {}

  // Until all have ended, and all jobs are done.
  void run(std::vector<Thread>& threads, const std::function<void()>& body) {
    threads_ = &threads, body_ = &body;
    for (Thread& thread : threads) ready_.push_back(&thread);
    while (const size_t count = jobs_.size() + ready_.size()) {
      const size_t drawn = draw(count);
      if (drawn < jobs_.size()) {
        taken(jobs_, drawn)();
      } else {
        go_on(*taken(ready_, drawn - jobs_.size()));
      }
    }
    tell_who_waits();
  }

  // The thread whose turn it is goes on when another wakes those who wait there.
  void wait(Waiting& there, const char* where, unsigned detail) {
    self->waits_at = where, self->detail = detail;
    there.push_back(self);
    leave();
    self->waits_at = nullptr;
  }
  void wake(Waiting& there) {
    ready_.insert(ready_.end(), there.begin(), there.end());
    there.clear();
  }
  // Others may go first.
  void yield() {
    ready_.push_back(self);
    leave();
  }
  // Done by nobody's thread, some time.
  void later(std::function<void()> job) { jobs_.push_back(std::move(job)); }

 private:
  static constexpr size_t kStackBytes = 1 << 18;
  static constexpr unsigned kWhile = 2000;

  // All alike for a while, then mostly those who went last, so that warps run far ahead of each other; then otherwise.
  size_t draw(size_t count) {
    if (turn_++ % kWhile == 0) rarity_ = 1u << random_() % 10;
    return random_() % rarity_ ? count - 1 : random_() % count;
  }

  template <class Type>
  Type taken(std::vector<Type>& from, size_t index) {
    std::swap(from[index], from.back());
    Type found = std::move(from.back());
    from.pop_back();
    return found;
  }

  void go_on(Thread& thread);

  void begin(Thread& thread) {
    thread.has_begun = true;
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = stacks_.get() + size_t(&thread - threads_->data()) * kStackBytes;
    context.uc_stack.ss_size = kStackBytes;
    current_ = this;
    makecontext(&context, &Turns::first_turn, 0);
    setcontext(&context);
  }
  static void first_turn() {
    (*current_->body_)();
    current_->end();
    _longjmp(current_->home_, 1);
  }
  void leave() {
    if (!_setjmp(self->place)) _longjmp(home_, 1);
  }
  void end();
  void tell_who_waits() const;

  std::unique_ptr<char[]> stacks_;
  std::jmp_buf home_;
  std::vector<Thread>* threads_ = nullptr;
  const std::function<void()>* body_ = nullptr;
  Waiting ready_;
  Work jobs_;
  std::minstd_rand random_{1};
  unsigned turn_ = 0, rarity_ = 1;
  inline static Turns* current_ = nullptr;
};

inline Turns* turns = nullptr;

// Where `count` threads wait for each other, again and again.
class Meeting {
 public:
  // The last of `count` lets the others go on.
  void wait(unsigned count) {
    if (++here_ < count) return turns->wait(waiting_, "a meeting of", count);
    here_ = 0;
    turns->wake(waiting_);
    turns->yield();
  }

 private:
  unsigned here_ = 0;
  Waiting waiting_;
};

struct Warp {
  Meeting meeting;
  std::array<uint64_t, 32> values{};
};

constexpr uint32_t kFirstAddress = 1024, kRankShift = 24;
constexpr size_t kSharedBytes = 232448;

struct Cluster;

struct Block {
  Cluster* cluster;
  unsigned rank, threads, running;
  Index index;
  uint8_t* memory;  // shared
  std::vector<Warp> warps;
  std::array<Meeting, 16> named;

  Block(Cluster* its, unsigned number, unsigned count, Index place)
      : cluster(its), rank(number), threads(count), running(count), index(place), warps((count + 31) / 32) {
    memory = static_cast<uint8_t*>(std::aligned_alloc(1024, (kFirstAddress + kSharedBytes + 1023) / 1024 * 1024));
    std::memset(memory, 0xFF, kFirstAddress + kSharedBytes);  // NaN to whoever reads what was not written
  }
  ~Block() { std::free(memory); }
  Block(const Block&) = delete;
};

struct Cluster {
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<Thread> threads;
  Meeting meeting;
  std::unordered_map<const uint8_t*, Waiting> at_barriers;

  // Blocks that follow each other in x, from `first` on.
  Cluster(unsigned count, unsigned each, Index first) : threads(count * each) {
    for (unsigned rank = 0; rank < count; ++rank) {
      blocks.push_back(std::make_unique<Block>(this, rank, each, Index{first.x + rank, first.y, first.z}));
    }
    for (unsigned i = 0; i < count * each; ++i) threads[i].block = blocks[i / each].get(), threads[i].number = i % each;
  }
};

inline Warp& warp() { return self->block->warps[self->number / 32]; }

inline void Turns::go_on(Thread& thread) {
  self = &thread;
  threadIdx.x = thread.number, blockIdx = thread.block->index;
  if (_setjmp(home_)) return;
  if (thread.has_begun) _longjmp(thread.place, 1);
  begin(thread);
}

inline void Turns::end() {
  --self->block->running;
  self->block = nullptr;
}

// And fails, if there are any: nobody is left who could wake them.
inline void Turns::tell_who_waits() const {
  std::map<std::tuple<unsigned, std::string, unsigned>, std::vector<unsigned>> waiting;
  for (const Thread& thread : *threads_) {
    if (thread.block) waiting[{thread.block->rank, thread.waits_at, thread.detail}].push_back(thread.number);
  }
  for (const auto& [where, numbers] : waiting) {
    const auto& [rank, what, detail] = where;
    std::fprintf(stderr, "%zu threads of block %u, the first %u, wait for ever at %s %u\n", numbers.size(), rank,
                 numbers.front(), what.c_str(), detail);
  }
  if (!waiting.empty()) std::abort();
}

}  // namespace sim
