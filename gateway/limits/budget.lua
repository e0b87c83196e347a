-- One step of budgets of a tenant: what was spent is added, what is over is no longer set aside, and a request sets aside
-- what it may cost, if there is money left in all of them.
-- KEYS     of each: book (hash: period, spent, aside, of:GATEWAY), held (sorted set: NANO:ID, end in milliseconds)
-- ARGV     now, milliseconds for which it is set aside, gateway, NANO:ID or empty; then of each: period, budget or -1,
--          number of the gateway's message or 0, spent, how many are over, and their NANO:IDs
-- returns  0 if it was set aside, else the number of one that has nothing left; and what is spent of each
local now, gateway, take = tonumber(ARGV[1]), 'of:' .. ARGV[3], ARGV[4]
local function amount(text) -- 0 for what is no amount that a gateway wrote
  local value = tonumber(text or 0)
  return value and value >= 0 and value < 9007199254740992 and value or 0
end
local function of(id)
  return amount(string.match(id, '^%d+'))
end
local refused, books, place, answer = 0, {}, 5, {0}
for number = 1, #KEYS / 2 do
  local book, held, limit = KEYS[2 * number - 1], KEYS[2 * number], tonumber(ARGV[place + 1])
  local found = redis.call('HMGET', book, 'period', 'spent', 'aside', gateway)
  local period, spent, aside, last = found[1] or '', amount(found[2]), amount(found[3]), amount(found[4])
  if period < ARGV[place] then -- clocks differ: no period comes back
    redis.call('DEL', book)
    period, spent, last = ARGV[place], 0, 0
  end
  local first = place + 5
  place = first + tonumber(ARGV[place + 4])
  for i = first, place - 1 do
    if redis.call('ZREM', held, ARGV[i]) == 1 then
      aside = aside - of(ARGV[i])
    end
  end
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', held, '-inf', now, 'LIMIT', 0, 1000)) do
    redis.call('ZREM', held, id)
    aside = aside - of(id)
  end
  local message = tonumber(ARGV[first - 3])
  if message > last then
    spent = spent + tonumber(ARGV[first - 2])
    redis.call('HSET', book, gateway, ARGV[first - 3])
  end
  aside = math.max(0, aside)
  if limit >= 0 and spent + aside >= limit then
    refused = number
  end
  books[number] = {book = book, held = held, period = period, spent = spent, aside = aside}
end
answer[1] = refused
for number, one in ipairs(books) do
  if refused == 0 and take ~= '' then
    redis.call('ZADD', one.held, now + tonumber(ARGV[2]), take)
    redis.call('PEXPIRE', one.held, tonumber(ARGV[2]) + 60000)
    one.aside = one.aside + of(take)
  end
  if redis.call('EXISTS', one.held) == 0 then
    one.aside = 0
  end
  local spent, aside = string.format('%.0f', one.spent), string.format('%.0f', one.aside)
  redis.call('HSET', one.book, 'period', one.period, 'spent', spent, 'aside', aside)
  redis.call('EXPIRE', one.book, 2764800) -- 32 days
  answer[number + 1] = one.spent
end
return answer
