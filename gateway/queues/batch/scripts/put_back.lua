-- A line waits again, unless it was tried too often.
-- KEYS     the beginning of all keys
-- ARGV     owner, line, lane, place, tenant, model, attempts at most; 0 when this was none; where they are counted
-- returns  "waits", "exhausted", or "gone" when it is not the owner's
local prefix, ref = KEYS[1], ARGV[2]
local is_claim, owner = pcall(struct.unpack, '>I2c0', redis.call('HGET', prefix .. 'claimed', ref) or '')
if not is_claim or owner ~= ARGV[1] then
  return 'gone'
end
local most = tonumber(ARGV[7])
if most > 0 and redis.call('HINCRBY', prefix .. ARGV[8], ref, 1) >= most then
  return 'exhausted'
end
redis.call('ZREM', prefix .. 'claims', ref)
redis.call('HDEL', prefix .. 'claimed', ref)
redis.call('ZADD', prefix .. 'waiting:' .. ARGV[3], 0, ARGV[4])
redis.call('ZADD', prefix .. 'turns:' .. ARGV[6], 'NX', redis.call('HGET', prefix .. 'clock', ARGV[6]) or 0, ARGV[5])
redis.call('SADD', prefix .. 'models', ARGV[6])
return 'waits'
