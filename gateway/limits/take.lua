-- Takes what a request needs from its tenant's buckets, and a lease, if all of it is there.
-- ARGV     now, microseconds of a burst and of a lease, id of a flight or empty, flights at most; then kind and cost in
--          microseconds of each bucket
-- returns  1 if it was taken else 0, now, and when each bucket is full again
local burst, lease, flight, most = tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4], tonumber(ARGV[5])

local admitted, kinds, costs, full = 1, {}, {}, {}
for i = 6, #ARGV, 2 do
  kinds[#kinds + 1] = ARGV[i]
  costs[#costs + 1] = tonumber(ARGV[i + 1])
end
local found = #kinds > 0 and redis.call('HMGET', buckets, unpack(kinds))
for i = 1, #kinds do
  full[i] = math.max(full_at(found[i]), now)
  if costs[i] > 0 and full[i] + math.min(costs[i], burst) > now + burst then
    admitted = 0
  end
end
if flight ~= '' then
  redis.call('ZREMRANGEBYSCORE', flights, '-inf', string.format('%.0f', now))
  if redis.call('ZCARD', flights) >= most then
    admitted = 0
  end
end

if admitted == 1 then
  local last, written = now, {}
  for i = 1, #kinds do
    full[i] = full[i] + costs[i]
    last = math.max(last, full[i])
    written[2 * i - 1], written[2 * i] = kinds[i], string.format('%.0f', full[i])
  end
  if #kinds > 0 then
    redis.call('HSET', buckets, unpack(written))
    -- A second more: clocks are not this script's, and a key that ends early would be a bucket that is full early.
    redis.call('PEXPIRE', buckets, math.ceil((last - now) / 1000) + 1000)
  end
  if flight ~= '' then
    redis.call('ZADD', flights, string.format('%.0f', now + lease), flight)
    redis.call('PEXPIRE', flights, math.ceil(lease / 1000) + 1000)
  end
end
return {admitted, now, unpack(full)}
