-- Tells what was removed since somebody looked.
-- KEYS     head (hash: log, its name; number, of its last removal), removals (list, the last one first)
-- ARGV     name of the log that was read, number of the last removal that was, name of a log if there is none
-- Returns  name of the log, number of its last removal, and what was removed after that number, as far as it is known
local log, number = redis.call('HGET', KEYS[1], 'log'), tonumber(redis.call('HGET', KEYS[1], 'number') or 0)
if not log then
  log = ARGV[3]
  redis.call('HSET', KEYS[1], 'log', log)
end
local since = log == ARGV[1] and tonumber(ARGV[2]) or 0
return { log, number, unpack(since < number and redis.call('LRANGE', KEYS[2], 0, number - since - 1) or {}) }
