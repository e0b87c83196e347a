-- A job's record in place of its last version, within the limits of its tenant.
-- KEYS     the beginning of all keys
-- ARGV     job, version that is replaced (0: the job is new), JSON, tenant, dialect, lines, millisecond from which on it
--          may be forgotten (empty while it is open), open jobs at most, lines of those at most, jobs that are kept
-- returns  "kept"; "changed" for another version, "jobs" or "lines" past a limit
local prefix, job, is_new, lines = KEYS[1], ARGV[1], ARGV[2] == '0', tonumber(ARGV[6])
local key, open, all = prefix .. 'job:' .. job, prefix .. 'open:' .. ARGV[4], prefix .. 'of:' .. ARGV[5] .. ':' .. ARGV[4]
if (redis.call('HGET', key, 'version') or '0') ~= ARGV[2] then
  return 'changed'
end
local before = is_new and 0 or tonumber(redis.call('HGET', open, job))
if ARGV[7] ~= '' then
  redis.call('SREM', prefix .. 'open', job)
  redis.call('HDEL', open, job)
  redis.call('ZADD', prefix .. 'ended', ARGV[7], job)
elseif is_new or (before and lines ~= before) then
  local total = lines - before
  for _, held in ipairs(redis.call('HVALS', open)) do
    total = total + (#held < 10 and tonumber(held:match('^%d+$')) or 0)
  end
  if is_new and redis.call('HLEN', open) >= tonumber(ARGV[8]) then
    return 'jobs'
  elseif lines > before and total > tonumber(ARGV[9]) then
    return 'lines'
  end
  redis.call('HSET', open, job, lines)
end
redis.call('HSET', key, 'version', ARGV[2] + 1, 'json', ARGV[3])
redis.pcall('ZADD', prefix .. 'all', 0, job)  -- for pages alone: what else is there must stop no batch
if is_new then
  redis.call('SADD', prefix .. 'open', job)
  redis.call('ZADD', all, 0, job)
  local too_many = redis.call('ZCARD', all) - ARGV[10]
  for _, oldest in ipairs(too_many > 0 and redis.call('ZRANGE', all, 0, too_many - 1) or {}) do
    redis.call('ZADD', prefix .. 'ended', 'XX', 0, oldest)
  end
end
return 'kept'
