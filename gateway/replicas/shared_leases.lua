-- Writes leases, and reads those that were written since.
-- KEYS[1]  changes: a sorted set, id -> revision
-- KEYS[2]  heads: a hash, id -> head; under the empty name the last revision
-- KEYS[3]  tokens: a hash, id -> token ids of the prefix
-- KEYS[4]  touching: a hash with `owner`, the gateway that does, `end`, when another one may, and `stored`, tokens that
--          all gateways said they store
-- ARGV     the revision that is known, milliseconds that all this lives from now on at least, most ids, the gateway,
--          milliseconds for which it touches, tokens it stored, number of ids to remove, these; then id, head and
--          tokens (or '' where they are there) of each lease
-- returns  the last revision; 1 if this gateway touches, else 0; tokens that all stored; then id and head of each lease
--          that was written behind the known one, the oldest first.
--          A revision that is smaller than the known one: everything was lost
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local owner = redis.call('HGET', KEYS[4], 'owner')
local touches = owner == ARGV[4] or now >= tonumber(redis.call('HGET', KEYS[4], 'end') or 0)
if touches then
  redis.call('HSET', KEYS[4], 'owner', ARGV[4], 'end', string.format('%d', now + ARGV[5]))
end
local stored = redis.call('HINCRBY', KEYS[4], 'stored', ARGV[6])
redis.call('PEXPIRE', KEYS[4], 3600000)
local at = 7 + tonumber(ARGV[7])
for i = 8, at do
  redis.call('ZREM', KEYS[1], ARGV[i])
  redis.call('HDEL', KEYS[2], ARGV[i])
  redis.call('HDEL', KEYS[3], ARGV[i])
end
for i = at + 1, #ARGV, 3 do
  if redis.call('ZSCORE', KEYS[1], ARGV[i]) or redis.call('ZCARD', KEYS[1]) < tonumber(ARGV[3]) then
    redis.call('ZADD', KEYS[1], redis.call('HINCRBY', KEYS[2], '', 1), ARGV[i])
    redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 1])
    if ARGV[i + 2] ~= '' then
      redis.call('HSET', KEYS[3], ARGV[i], ARGV[i + 2])
    end
    for key = 1, 3 do
      if redis.call('PTTL', KEYS[key]) < tonumber(ARGV[2]) then
        redis.call('PEXPIRE', KEYS[key], ARGV[2])
      end
    end
  end
end
local answer = {redis.call('HGET', KEYS[2], '') or '0', touches and 1 or 0, stored}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. ARGV[1], '+inf', 'LIMIT', 0, 256)) do
  answer[#answer + 1] = id
  answer[#answer + 1] = redis.call('HGET', KEYS[2], id) or ''
  answer[1] = redis.call('ZSCORE', KEYS[1], id)
end
return answer
