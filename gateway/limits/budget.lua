-- One step of a tenant's budget: what was spent is added, what is over is no longer set aside, and a request sets aside
-- what it may cost, if there is money left.
-- KEYS     book (hash: period, spent, aside, of:GATEWAY), held (sorted set: NANO:ID, end in milliseconds)
-- ARGV     now, period, budget or -1, NANO:ID or empty, milliseconds for which it is set aside, gateway, number of its
--          message or 0, spent; then NANO:ID of what is over
-- returns  1 if it was set aside else 0, and spent
local book, held, now, limit = KEYS[1], KEYS[2], tonumber(ARGV[1]), tonumber(ARGV[3])
local function amount(text) -- 0 for what is no amount that a gateway wrote
  local value = tonumber(text or 0)
  return value and value >= 0 and value < 9007199254740992 and value or 0
end
local function of(id)
  return amount(string.match(id, '^%d+'))
end
local found = redis.call('HMGET', book, 'period', 'spent', 'aside', 'of:' .. ARGV[6])
local period, spent, aside, last = found[1] or '', amount(found[2]), amount(found[3]), amount(found[4])
if period < ARGV[2] then -- clocks differ: no period comes back
  redis.call('DEL', book)
  period, spent, last = ARGV[2], 0, 0
end
for i = 9, #ARGV do
  if redis.call('ZREM', held, ARGV[i]) == 1 then
    aside = aside - of(ARGV[i])
  end
end
for _, id in ipairs(redis.call('ZRANGEBYSCORE', held, '-inf', now, 'LIMIT', 0, 1000)) do
  redis.call('ZREM', held, id)
  aside = aside - of(id)
end
local number = tonumber(ARGV[7])
if number > last then
  spent, last = spent + tonumber(ARGV[8]), number
  redis.call('HSET', book, 'of:' .. ARGV[6], ARGV[7])
end
aside = math.max(0, aside)
local admitted = (limit < 0 or spent + aside < limit) and 1 or 0
if admitted == 1 and ARGV[4] ~= '' then
  redis.call('ZADD', held, now + tonumber(ARGV[5]), ARGV[4])
  redis.call('PEXPIRE', held, tonumber(ARGV[5]) + 60000)
  aside = aside + of(ARGV[4])
end
if redis.call('EXISTS', held) == 0 then
  aside = 0
end
redis.call('HSET', book, 'period', period, 'spent', string.format('%.0f', spent), 'aside', string.format('%.0f', aside))
redis.call('EXPIRE', book, 2764800) -- 32 days
return {admitted, spent}
