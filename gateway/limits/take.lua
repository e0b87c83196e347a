-- Takes what a request needs from its owners' buckets, and a lease of each, if all of it is there.
-- ARGV     now, microseconds of a burst and of a lease, id of a flight or empty; then for each owner: flights at most (0:
--          it has none), number of buckets, and kind and cost in microseconds of each
-- returns  0 if it was taken, else the number of an owner that refuses it; now, and when each bucket is full again
local burst, lease, flight = tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]

local refused, owners, place, answer = 0, {}, 5, {0, now}
for number = 1, #KEYS / 2 do
  local one = {buckets = KEYS[2 * number - 1], flights = KEYS[2 * number], kinds = {}, costs = {}, full = {}}
  one.most = tonumber(ARGV[place])
  local last = place + 1 + 2 * tonumber(ARGV[place + 1])
  for i = place + 2, last, 2 do
    one.kinds[#one.kinds + 1] = ARGV[i]
    one.costs[#one.costs + 1] = tonumber(ARGV[i + 1])
  end
  place = last + 1
  local found = #one.kinds > 0 and redis.call('HMGET', one.buckets, unpack(one.kinds))
  for i = 1, #one.kinds do
    one.full[i] = math.max(full_at(found[i]), now)
    if one.costs[i] > 0 and one.full[i] + math.min(one.costs[i], burst) > now + burst then
      refused = refused == 0 and number or refused
    end
  end
  if one.most > 0 then
    redis.call('ZREMRANGEBYSCORE', one.flights, '-inf', string.format('%.0f', now))
    if redis.call('ZCARD', one.flights) >= one.most then
      refused = refused == 0 and number or refused
    end
  end
  owners[number] = one
end

answer[1] = refused
for _, one in ipairs(owners) do
  if refused == 0 then
    local last, written = now, {}
    for i = 1, #one.kinds do
      one.full[i] = one.full[i] + one.costs[i]
      last = math.max(last, one.full[i])
      written[2 * i - 1], written[2 * i] = one.kinds[i], string.format('%.0f', one.full[i])
    end
    if #one.kinds > 0 then
      redis.call('HSET', one.buckets, unpack(written))
      -- A second more: clocks are not this script's, and a key that ends early would be a bucket that is full early.
      redis.call('PEXPIRE', one.buckets, math.ceil((last - now) / 1000) + 1000)
    end
    if one.most > 0 then
      redis.call('ZADD', one.flights, string.format('%.0f', now + lease), flight)
      redis.call('PEXPIRE', one.flights, math.ceil(lease / 1000) + 1000)
    end
  end
  for i = 1, #one.kinds do
    answer[#answer + 1] = one.full[i]
  end
end
return answer
