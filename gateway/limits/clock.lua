-- In front of the others: ARGV[1] is now in microseconds, or empty for Redis's own clock.
local now = tonumber(ARGV[1])
if not now then
  local time = redis.call('TIME')
  now = time[1] * 1000000 + time[2]
end
