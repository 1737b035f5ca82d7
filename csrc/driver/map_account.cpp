#include "vmserve/map_account.h"

#include <map>
#include <mutex>
#include <string>

namespace vmserve {

MapAccount::MapAccount(std::int64_t max_map_count)
    : most_(static_cast<std::int64_t>(static_cast<double>(max_map_count) * kMapShare)),
      most_with_cuts_(static_cast<std::int64_t>(static_cast<double>(max_map_count) * kCutShare)) {}

std::shared_ptr<MapAccount> MapAccount::shared(const SystemLimits& limits) {
  static std::mutex mutex;
  static std::map<std::string, std::weak_ptr<MapAccount>> accounts;
  const std::lock_guard<std::mutex> lock(mutex);
  std::weak_ptr<MapAccount>& known = accounts[limits.root()];
  std::shared_ptr<MapAccount> account = known.lock();
  if (account == nullptr) {
    account = std::make_shared<MapAccount>(limits.max_map_count());
    known = account;
  }
  return account;
}

}  // namespace vmserve
