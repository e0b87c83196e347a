-- At the end of a request: what it did not use flows back, what it used beyond that is taken, and leases end.
-- ARGV     now, how many flights, their ids; then for each owner: number of buckets, and kind and cost in microseconds
--          of each
local place = 3 + tonumber(ARGV[2])
for number = 1, #KEYS / 2 do
  local buckets, flights = KEYS[2 * number - 1], KEYS[2 * number]
  for i = 3, 2 + tonumber(ARGV[2]) do
    redis.call('ZREM', flights, ARGV[i])
  end
  local last = place + 2 * tonumber(ARGV[place])
  for i = place + 1, last, 2 do
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
  place = last + 1
end
return 1
