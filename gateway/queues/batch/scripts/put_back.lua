-- A line waits again.
-- KEYS     the beginning of all keys
-- ARGV     owner, line, lane, place, tenant, model, tries in vain and dead engines
-- returns  whether it was the owner's
local prefix, ref = KEYS[1], ARGV[2]
local is_claim, owner = pcall(struct.unpack, '>I2c0', redis.call('HGET', prefix .. 'claimed', ref) or '')
if not is_claim or owner ~= ARGV[1] then
  return 0
end
redis.call('ZREM', prefix .. 'claims', ref)
redis.call('HDEL', prefix .. 'claimed', ref)
if ARGV[7] ~= '0 0' then
  redis.call('HSET', prefix .. 'tries', ref, ARGV[7])
end
redis.call('ZADD', prefix .. 'waiting:' .. ARGV[3], 0, ARGV[4])
redis.call('ZADD', prefix .. 'turns:' .. ARGV[6], 'NX', redis.call('HGET', prefix .. 'clock', ARGV[6]) or 0, ARGV[5])
redis.call('SADD', prefix .. 'models', ARGV[6])
return 1
