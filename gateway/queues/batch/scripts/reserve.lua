-- The lines of a job count among its tenant's from now on.
-- KEYS     the beginning of all keys
-- ARGV     job, its lines, lines of the tenant at most
-- returns  whether the tenant may have so many
local key, quota, lines = KEYS[1] .. 'job:' .. ARGV[1], KEYS[1] .. 'quota', tonumber(ARGV[2])
local tenant = redis.call('HGET', key, 'tenant')
if not tenant then
  return 0
end
local more = lines - tonumber(redis.call('HGET', key, 'lines'))
if more > 0 and tonumber(redis.call('HGET', quota, 'lines:' .. tenant) or 0) + more > tonumber(ARGV[3]) then
  return 0
end
redis.call('HSET', key, 'lines', lines)
redis.call('HINCRBY', quota, 'lines:' .. tenant, more)
return 1
