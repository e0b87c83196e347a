-- Lines whose lease is over get another owner. The try that ended so is counted.
-- KEYS     the beginning of all keys
-- ARGV     owner, lines at most, millisecond that it is, millisecond at which their new lease ends, how many of them
--          may have been tried in vain before that, lines that are looked at
-- returns  lane, place, tries in vain and dead engines of each
local claims, claimed, attempts, taken = KEYS[1] .. 'claims', KEYS[1] .. 'claimed', KEYS[1] .. 'attempts', {}
local left, tried_left = tonumber(ARGV[2]), tonumber(ARGV[5])
for _, ref in ipairs(redis.call('ZRANGEBYSCORE', claims, '-inf', ARGV[3], 'LIMIT', 0, ARGV[6])) do
  local held = redis.call('HGET', claimed, ref) or ''
  local is_claim, _, lane, rest = pcall(struct.unpack, '>I2c0I2c0', held)
  local tried = redis.call('HEXISTS', attempts, ref)
  if not is_claim or #held - rest < 23 then -- nobody knows what it was
    redis.call('ZREM', claims, ref)
    redis.call('HDEL', claimed, ref)
  elseif left > 0 and tried <= tried_left then
    left, tried_left = left - 1, tried_left - tried
    local place = held:sub(rest)
    redis.call('ZADD', claims, ARGV[4], ref)
    redis.call('HSET', claimed, ref, struct.pack('>I2c0I2c0', #ARGV[1], ARGV[1], #lane, lane) .. place)
    if not tonumber(redis.call('HGET', attempts, ref) or 0) then -- no number of ours
      redis.call('HDEL', attempts, ref)
    end
    taken[#taken + 1] = lane
    taken[#taken + 1] = place
    taken[#taken + 1] = redis.call('HINCRBY', attempts, ref, 1)
    taken[#taken + 1] = tonumber(redis.call('HGET', KEYS[1] .. 'deaths', ref) or 0) or 0
  end
end
return taken
