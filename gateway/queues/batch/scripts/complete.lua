-- The first result of a line is its result.
-- KEYS     the beginning of all keys
-- ARGV     line, lane, place, job, number of the line, result, kind, prompt tokens, completion tokens, cached tokens,
--          cache write tokens
-- returns  how many lines of the job are done; -1 when this one neither waits nor runs
local prefix, ref = KEYS[1], ARGV[1]
if redis.call('ZREM', prefix .. 'claims', ref) + redis.call('ZREM', prefix .. 'waiting:' .. ARGV[2], ARGV[3]) == 0 then
  return -1
end
redis.call('HDEL', prefix .. 'claimed', ref)
redis.call('HDEL', prefix .. 'tries', ref)
local counts, done = prefix .. 'counts:' .. ARGV[4], 0
redis.call('HSET', prefix .. 'results:' .. ARGV[4], ARGV[5], ARGV[6])
redis.call('HINCRBY', counts, ARGV[7], 1)
for index, name in ipairs({'prompt_tokens', 'completion_tokens', 'cached_tokens', 'cache_write_tokens'}) do
  redis.call('HINCRBY', counts, name, ARGV[7 + index])
end
for _, count in ipairs(redis.call('HMGET', counts, 'succeeded', 'failed', 'cancelled', 'expired')) do
  done = done + (tonumber(count) or 0)
end
return done
