-- Lines whose lease is over get another owner.
-- KEYS     the beginning of all keys
-- ARGV     owner, lines at most, millisecond that it is, millisecond at which their new lease ends
-- returns  lane and place of each
local claims, claimed, taken = KEYS[1] .. 'claims', KEYS[1] .. 'claimed', {}
for _, ref in ipairs(redis.call('ZRANGEBYSCORE', claims, '-inf', ARGV[3], 'LIMIT', 0, ARGV[2])) do
  local _, lane, rest = struct.unpack('>I2c0I2c0', redis.call('HGET', claimed, ref))
  local place = redis.call('HGET', claimed, ref):sub(rest)
  redis.call('ZADD', claims, ARGV[4], ref)
  redis.call('HSET', claimed, ref, struct.pack('>I2c0I2c0', #ARGV[1], ARGV[1], #lane, lane) .. place)
  taken[#taken + 1] = lane
  taken[#taken + 1] = place
end
return taken
