-- Lines whose lease is over get another owner. That counts as a try in vain.
-- KEYS     the beginning of all keys
-- ARGV     owner, lines at most, current millisecond, millisecond at which their new lease ends, how many of them may
--          have been tried in vain before that, lines that are looked at
-- returns  lane, place, and tries in vain and dead engines of each
local claims, claimed, tries, taken = KEYS[1] .. 'claims', KEYS[1] .. 'claimed', KEYS[1] .. 'tries', {}
local left, tried_left = tonumber(ARGV[2]), tonumber(ARGV[5])
for _, ref in ipairs(redis.call('ZRANGEBYSCORE', claims, '-inf', ARGV[3], 'LIMIT', 0, ARGV[6])) do
  local held = redis.call('HGET', claimed, ref) or ''
  local is_claim, _, lane, rest = pcall(struct.unpack, '>I2c0I2c0', held)
  local tried = redis.call('HEXISTS', tries, ref)
  if not is_claim or #held - rest < 23 then -- no claim of ours
    redis.call('ZREM', claims, ref)
    redis.call('HDEL', claimed, ref)
  elseif left > 0 and tried <= tried_left then
    left, tried_left = left - 1, tried_left - tried
    local place = held:sub(rest)
    local attempts, deaths = (redis.call('HGET', tries, ref) or ''):match('^(%d%d?%d?) (%d%d?%d?)$')
    local now_tried = ((attempts or 0) + 1) .. ' ' .. (deaths or 0)
    redis.call('ZADD', claims, ARGV[4], ref)
    redis.call('HSET', claimed, ref, struct.pack('>I2c0I2c0', #ARGV[1], ARGV[1], #lane, lane) .. place)
    redis.call('HSET', tries, ref, now_tried)
    for _, one in ipairs({lane, place, now_tried}) do
      taken[#taken + 1] = one
    end
  end
end
return taken
