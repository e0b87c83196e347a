-- A job that is new, within the limits of its tenant.
-- KEYS     the beginning of all keys
-- ARGV     job, JSON, tenant, dialect, its lines, open jobs at most, lines of those at most, jobs that are kept at most
-- returns  "kept"; "jobs" or "lines" past a limit
local prefix, job, tenant, lines = KEYS[1], ARGV[1], ARGV[3], tonumber(ARGV[5])
local quota, all = prefix .. 'quota', prefix .. 'of:' .. ARGV[4] .. ':' .. tenant
if redis.call('EXISTS', prefix .. 'job:' .. job) == 1 then -- a client that lost its connection asks again
  return 'kept'
end
if tonumber(redis.call('HGET', quota, 'jobs:' .. tenant) or 0) >= tonumber(ARGV[6]) then
  return 'jobs'
end
if tonumber(redis.call('HGET', quota, 'lines:' .. tenant) or 0) + lines > tonumber(ARGV[7]) then
  return 'lines'
end
redis.call('HSET', prefix .. 'job:' .. job, 'version', 0, 'json', ARGV[2], 'tenant', tenant, 'dialect', ARGV[4], 'lines', lines)
redis.call('SADD', prefix .. 'open', job)
redis.call('ZADD', all, 0, job)
redis.call('HINCRBY', quota, 'jobs:' .. tenant, 1)
redis.call('HINCRBY', quota, 'lines:' .. tenant, lines)
local too_many = redis.call('ZCARD', all) - tonumber(ARGV[8])
if too_many > 0 then
  for _, oldest in ipairs(redis.call('ZRANGE', all, 0, too_many - 1)) do
    redis.call('ZADD', prefix .. 'ended', 'XX', 0, oldest)
  end
end
return 'kept'
