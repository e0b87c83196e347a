-- In front of the other scripts.
-- KEYS  of each owner, a tenant or a key of it: buckets (hash: kind, microsecond at which it is full again), flights
--       (sorted set: id, end in microseconds)
-- ARGV  now in microseconds, or empty for Redis's own clock; then what each script has of its own
local now = tonumber(ARGV[1])
if not now then
  local time = redis.call('TIME')
  now = time[1] * 1000000 + time[2]
end
local function full_at(found) -- 0, which is full, for what is no time that a gateway wrote
  local at = tonumber(found or 0)
  return at and at >= 0 and at < 9007199254740992 and at or 0
end
