-- At the end of a request: what it did not use flows back, what it used beyond that is taken, and leases end.
-- ARGV     now, how many flights, their ids; then kind and cost in microseconds of each bucket
local first = 3 + tonumber(ARGV[2])
for i = 3, first - 1 do
  redis.call('ZREM', flights, ARGV[i])
end
for i = first, #ARGV, 2 do
  local at = math.max(full_at(redis.call('HGET', buckets, ARGV[i])), now) - tonumber(ARGV[i + 1])
  if at > now then
    redis.call('HSET', buckets, ARGV[i], string.format('%.0f', at))
    local stays = math.ceil((at - now) / 1000) + 1000
    if redis.call('PTTL', buckets) < stays then
      redis.call('PEXPIRE', buckets, stays)
    end
  else
    redis.call('HDEL', buckets, ARGV[i])
  end
end
return 1
