-- Planned lines of a job wait from now on.
-- KEYS     the beginning of all keys
-- ARGV     job, the same in bytes, tenant, lines at most
-- returns  how many are left
local prefix, job, raw, tenant = KEYS[1], ARGV[1], ARGV[2], ARGV[3]
local staged, counts = prefix .. 'staged:' .. job, prefix .. 'counts:' .. job
local line = tonumber(redis.call('HGET', counts, 'queued') or 0) or 0
local plans = redis.call('LRANGE', staged, 0, ARGV[4] - 1)
for _, plan in ipairs(plans) do
  local is_plan, model, tokens, rest = pcall(struct.unpack, '>I2c0I4', plan)
  if is_plan then
    local lane = tenant .. ':' .. model
    redis.call('ZADD', prefix .. 'waiting:' .. lane, 0, plan:sub(rest) .. raw .. struct.pack('>I4I4', line, tokens))
    redis.call('ZADD', prefix .. 'turns:' .. model, 'NX', redis.call('HGET', prefix .. 'clock', model) or 0, tenant)
    redis.call('SADD', prefix .. 'models', model)
    redis.call('SADD', prefix .. 'lanes:' .. job, lane)
  else -- somebody wrote over it: the line has failed, and the job comes to its end
    redis.call('HSET', prefix .. 'results:' .. job, line, 'failed')
    redis.call('HINCRBY', counts, 'failed', 1)
  end
  line = line + 1
end
redis.call('LTRIM', staged, #plans, -1)
redis.call('HSET', counts, 'queued', line)
return redis.call('LLEN', staged)
