-- Take a lock on this node, or say who has it and wait in line. All names or none.
-- KEYS: index, cancel marker; of each name: holder, fence, queue, enrolments; if shared, the holders of each name
-- ARGV: nonce, value, ttl ms, proposed token, fence keep ms ('' is for ever), ahead µs, nonce to adopt, prefix,
--       waiter ('' does not wait), its stamp, enrolment ms, barge, shared, passing ('1' or '')
local index, marker = KEYS[1], KEYS[2]
local nonce, value, ttl, number, keep = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[5]
local ahead, adopt, prefix = tonumber(ARGV[6]), ARGV[7], ARGV[8]
local waiter, barge, shared, passing = ARGV[9], ARGV[12] == '1', ARGV[13] == '1', ARGV[14] == '1'
local SHARED = 'shared--------------------------'
local clock = redis.call('TIME')
local stamp = clock[1] .. string.format('%06d', clock[2])
local now_ms = math.floor(tonumber(stamp) / 1000)
local names = (#KEYS - 2) / (shared and 5 or 4)
local last = 2 + 4 * names

-- Read every key before writing any: a key of another type must not leave half a grant behind. (Waiters whose
-- enrolment is over are dropped on the way: that takes nothing from anybody.)
redis.call('ZCARD', index)
local cancelled = redis.call('EXISTS', marker) == 1
local high, busy, queued, left, endless, seated, alone = '0', nil, false, 0, {}, {}, {}
local stop -- the first name that is in the way
for i = 3, last, 4 do
  local current = redis.call('GET', KEYS[i])
  local fence = redis.call('GET', KEYS[i + 1]) or '0'
  if tonumber(fence) > tonumber(high) then high = fence end
  local owner = current and string.sub(current, 1, 32)
  alone[i] = owner ~= SHARED
  local ours = owner and (owner == nonce or (adopt ~= '' and owner == adopt))
  if owner and not ours and not (shared and owner == SHARED) then
    local pttl = redis.call('PTTL', KEYS[i])
    if pttl == -1 then endless[#endless + 1] = string.sub(KEYS[i], #prefix + 1, -3) end
    if busy == nil or pttl == -1 or (left ~= -1 and pttl > left) then left = pttl end
    busy = busy or string.sub(current, 33)
    stop = stop or i
  end
  if shared then redis.call('ZCARD', KEYS[last + (i + 1) / 4]) end
  if not ours then
    local first = redis.call('ZRANGE', KEYS[i + 2], 0, 0)[1]
    while first and first ~= waiter do
      local enrolled = redis.call('ZSCORE', KEYS[i + 3], first)
      if enrolled and tonumber(enrolled) > now_ms then break end
      redis.call('ZREM', KEYS[i + 2], first)
      redis.call('ZREM', KEYS[i + 3], first)
      first = redis.call('ZRANGE', KEYS[i + 2], 0, 0)[1]
    end
    if first and first == waiter then
      redis.call('ZCARD', KEYS[i + 3])
      seated[i] = true
    elseif first and not barge then
      -- Who makes room when granted has left the line where an attempt failed as a whole; its stamp says so.
      local ahead_of_it = waiter ~= '' and tonumber(ARGV[10]) < tonumber(redis.call('ZSCORE', KEYS[i + 2], first))
      if not ahead_of_it then
        queued = true
        stop = stop or i
      end
    end
  end
end
if cancelled then return 'CANCELLED ' .. high .. ' ' .. stamp .. ' 0 -1 ' end
-- A key without expiry was written by something else and blocks the name for ever: let people find it.
for _, slug in ipairs(endless) do
  redis.call('ZADD', index, '+inf', slug)
  if redis.call('PTTL', index) < ttl then redis.call('PEXPIRE', index, ttl) end
end
if busy or queued then
  local place, enrolment = -1, tonumber(ARGV[11])
  if waiter ~= '' then
    for i = 5, last, 4 do
      -- As who takes one name after the other, in their order: it has no claim yet to what comes behind the name it
      -- waits for, and who has that name may want those.
      if i > stop + 2 then
        local first = redis.call('ZRANGE', KEYS[i], 0, 0)[1]
        if redis.call('ZREM', KEYS[i], waiter) == 1 then
          redis.call('ZREM', KEYS[i + 1], waiter)
          local heir = redis.call('ZRANGE', KEYS[i], 0, 0)[1]
          if first == waiter and heir then
            redis.call('PUBLISH', prefix .. 'w:' .. string.match(heir, '^[^|]*'), heir)
          end
        end
      elseif redis.call('ZCARD', KEYS[i]) < 1000 or redis.call('ZSCORE', KEYS[i], waiter) then
        redis.call('ZADD', KEYS[i + 1], now_ms + enrolment, waiter) -- first, because it has not been read before
        redis.call('PEXPIRE', KEYS[i + 1], 2 * enrolment)
        redis.call('ZADD', KEYS[i], 'NX', ARGV[10], waiter)
        redis.call('PEXPIRE', KEYS[i], 2 * enrolment)
        place = math.max(place, redis.call('ZRANK', KEYS[i], waiter))
      end
    end
  end
  return (busy and 'BUSY ' or 'QUEUED ') .. high .. ' ' .. stamp .. ' ' .. left .. ' ' .. place .. ' ' .. (busy or '')
end

for i = 3, last, 4 do
  local ends = now_ms + ttl
  if shared then
    local holders = KEYS[last + (i + 1) / 4]
    if alone[i] then redis.call('DEL', holders) end -- of no meaning unless the holder's key says shared
    redis.call('ZREMRANGEBYSCORE', holders, '-inf', now_ms)
    redis.call('ZADD', holders, ends, nonce)
    ends = tonumber(redis.call('ZRANGE', holders, -1, -1, 'WITHSCORES')[2])
    redis.call('PEXPIRE', holders, ends - now_ms)
    redis.call('SET', KEYS[i], SHARED .. string.sub(value, 33), 'PX', ends - now_ms)
  else
    redis.call('SET', KEYS[i], value, 'PX', ttl)
  end
  redis.call('ZADD', index, ends, string.sub(KEYS[i], #prefix + 1, -3))
  if redis.call('PTTL', index) < ends - now_ms then redis.call('PEXPIRE', index, ends - now_ms) end
end
-- A waiter keeps its place until it has held the lock: a grant here may be none elsewhere. Where several may hold
-- at once it makes room instead, for the next in line to be let in as well.
for i in pairs(seated) do
  if passing then
    redis.call('ZREM', KEYS[i + 2], waiter)
    redis.call('ZREM', KEYS[i + 3], waiter)
    local first = redis.call('ZRANGE', KEYS[i + 2], 0, 0)[1]
    if first then redis.call('PUBLISH', prefix .. 'w:' .. string.match(first, '^[^|]*'), first) end
  else
    redis.call('ZADD', KEYS[i + 3], now_ms + math.min(ttl, tonumber(ARGV[11])), waiter)
  end
end
-- Names whose holder died leave the index here, a few at a time; a key without expiry stays listed.
for _, slug in ipairs(redis.call('ZRANGEBYSCORE', index, '-inf', now_ms, 'LIMIT', 0, 8)) do
  local pttl = redis.call('PTTL', prefix .. slug .. ':h')
  if pttl == -2 then
    redis.call('ZREM', index, slug)
  elseif pttl == -1 then
    redis.call('ZADD', index, '+inf', slug)
  else
    redis.call('ZADD', index, now_ms + pttl, slug)
  end
end
-- Strictly greater, and not absurdly in the future. Compare as numbers (exact below 2^53), store the text:
-- Lua's own text of such a number loses digits.
if tonumber(number) > tonumber(high) and tonumber(number) <= tonumber(stamp) + ahead then
  for i = 4, last, 4 do
    if keep == '' then redis.call('SET', KEYS[i], number) else redis.call('SET', KEYS[i], number, 'PX', keep) end
  end
  return 'ACCEPTED ' .. number .. ' ' .. stamp .. ' 0 -1 '
end
return 'GRANTED ' .. high .. ' ' .. stamp .. ' 0 -1 '
