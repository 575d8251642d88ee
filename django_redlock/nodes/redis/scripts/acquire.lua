-- Take a lock on this node, all names or none; if that fails, report the holder and join the queue.
-- KEYS: index, cancel tombstone; of all names the holders, the fences, the queues, the enrolments; if shared, the holders
--       of each name; of a permit, the holder and the holders of its lock; if a secret is adopted, its cancel tombstone
-- ARGV: secret, value, proposed fencing token, secret to adopt, waiter ('' does not wait), its stamp; the rest is the same for most
--       requests: prefix, ttl ms, fence keep ms ('' is for ever), ahead µs, enrolment ms, barge, shared (of a permit, the value
--       that the permits of its lock have in common), passing, strict ('1' or ''); the mark that the connection learned ('' is
--       none), see served.lua
-- A permit is an exclusive hold of its own name and joins the name of its lock, whose other permits have the same limit. So
-- those who hold that name in another way keep it out, and it them.
local call, sub = redis.call, string.sub
local index, tombstone = KEYS[1], KEYS[2]
local secret, value, number, adopt, waiter, since = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local prefix, ttl, keep, ahead, enrolment = ARGV[7], tonumber(ARGV[8]), ARGV[9], tonumber(ARGV[10]), tonumber(ARGV[11])
local barge, shared, passing, mark = ARGV[12] == '1', ARGV[13] == '1', ARGV[14] == '1', ARGV[16]
local common = #ARGV[13] > 1 and ARGV[13]
local SHARED = 'shared--------------------------'
local clock = call('TIME')
local stamp = clock[1] .. string.format('%06d', clock[2])
local now_ms = math.floor(tonumber(stamp) / 1000)
local names = math.floor((#KEYS - 2) / (shared and 5 or 4))
local h, f, q, s, r = 2, 2 + names, 2 + 2 * names, 2 + 3 * names, 2 + 4 * names -- the index before each kind of key

-- Read every key before writing any: a key of another type must not leave half a grant behind. (Waiters whose
-- enrolment has expired are dropped on the way, which harms nobody.) The index need not be read: the first write goes there.
-- The number of commands costs most. If nothing exists but the values read here, nobody waits for any of the names, and
-- no key is of another type.
local plain, cancelled = not shared, nil
local strings = call('MGET', prefix .. 'served', unpack(KEYS, 2, shared and 2 or q)) -- the mark, the tombstone, the holders, the fences
-- Another memory than the one that the connection learned may lack locks, so it decides nothing.
if mark ~= '' and strings[1] ~= mark then return redis.error_reply('FORGOT another memory') end
if plain then
  cancelled = strings[2]
  local found = 0
  for i = 2, 2 * names + 2 do
    if strings[i] then found = found + 1 end
  end
  plain = call('EXISTS', unpack(KEYS, 2, s)) == found
end
if not plain then cancelled = call('GET', tombstone) end
local high, busy, queued, left, endless, first_in_queue, alone = '0', nil, false, 0, {}, {}, {}
local stop -- the first name that is not free
local base, first_permit = KEYS[r + 1], false
if common then
  local current = call('GET', base)
  call('ZCARD', KEYS[r + 2])
  first_permit = not current or sub(current, 1, 32) ~= sub(common, 1, 32)
  if current and first_permit then
    left, busy, stop = call('PTTL', base), sub(current, 33), 1
    if left == -1 then endless[1] = sub(base, #prefix + 1, -3) end
  end
end
local handed = adopt ~= '' and cancelled == 'superseded' -- by the holder that has replaced this one
for i = 1, names do
  local current, fence
  if plain then
    current, fence = strings[2 + i], strings[2 + names + i]
  else
    current, fence = call('GET', KEYS[h + i]), call('GET', KEYS[f + i])
  end
  if fence and tonumber(fence) > tonumber(high) then high = fence end
  local owner = current and sub(current, 1, 32)
  alone[i] = owner ~= SHARED
  local ours = owner and (owner == secret or (adopt ~= '' and owner == adopt))
  handed = handed and owner == adopt
  if owner and not ours and not (shared and owner == SHARED) then
    local pttl = call('PTTL', KEYS[h + i])
    if pttl == -1 then endless[#endless + 1] = sub(KEYS[h + i], #prefix + 1, -3) end
    if busy == nil or pttl == -1 or (left ~= -1 and pttl > left) then left = pttl end
    busy = busy or sub(current, 33)
    stop = stop or i
  end
  if not owner and ARGV[15] == '1' then
    if busy == nil then left = 0 end
    busy, stop = busy or '', stop or i
  end
  if shared then call('ZCARD', KEYS[r + i]) end
  if not ours and not plain then
    local first = call('ZRANGE', KEYS[q + i], 0, 0)[1]
    while first and first ~= waiter do
      local enrolled = call('ZSCORE', KEYS[s + i], first)
      if enrolled and tonumber(enrolled) > now_ms then break end
      call('ZREM', KEYS[q + i], first)
      call('ZREM', KEYS[s + i], first)
      first = call('ZRANGE', KEYS[q + i], 0, 0)[1]
    end
    if first and first == waiter then
      call('ZCARD', KEYS[s + i])
      first_in_queue[i] = true
    elseif first and not barge then
      -- A waiter of a shared lock leaves the queue with the grant. If its attempt failed as a whole, its stamp shows that
      -- it was here before.
      local ahead_of_it = waiter ~= '' and tonumber(since) < tonumber(call('ZSCORE', KEYS[q + i], first))
      if not ahead_of_it then
        queued = true
        stop = stop or i
      end
    end
  end
end
if cancelled and not handed then return 'CANCELLED ' .. high .. ' ' .. stamp .. ' 0 -1 ' end
-- Another program wrote a key without expiry. It blocks the name for ever, so listings must show it.
for _, slug in ipairs(endless) do
  call('ZADD', index, '+inf', slug)
  if call('PTTL', index) < ttl then call('PEXPIRE', index, ttl) end
end
if busy or queued then
  local position = -1
  if waiter ~= '' then
    for i = 1, names do
      local queue, enrolments = KEYS[q + i], KEYS[s + i]
      -- It waits as if it took one name after another, in their order. It has no claim yet to the names behind the one
      -- it waits for, and the holder of that one may want them.
      if i > stop then
        local first = call('ZRANGE', queue, 0, 0)[1]
        if call('ZREM', queue, waiter) == 1 then
          call('ZREM', enrolments, waiter)
          local heir = call('ZRANGE', queue, 0, 0)[1]
          if first == waiter and heir then
            call('PUBLISH', prefix .. 'w:' .. string.match(heir, '^[^|]*'), heir)
          end
        end
      elseif call('ZCARD', queue) < 1000 or call('ZSCORE', queue, waiter) then
        call('ZADD', enrolments, now_ms + enrolment, waiter) -- first, because it has not been read before
        call('ZADD', queue, 'NX', since, waiter)
        -- Another waiter may be away for longer than this one.
        local lasts = math.max(call('PTTL', enrolments), 2 * enrolment)
        call('PEXPIRE', enrolments, lasts)
        call('PEXPIRE', queue, lasts)
        position = math.max(position, call('ZRANK', queue, waiter))
      end
    end
  end
  return (busy and 'BUSY ' or 'QUEUED ') .. high .. ' ' .. stamp .. ' ' .. left .. ' ' .. position .. ' ' .. (busy or '')
end

local listed, latest = {}, now_ms + ttl
for i = 1, names do
  listed[2 * i - 1], listed[2 * i] = latest, sub(KEYS[h + i], #prefix + 1, -3)
end
call('ZADD', index, unpack(listed)) -- first: if the index is of another type, nothing has been written
local join -- makes the holder one of those who hold a name together, and returns when the last of them ends
if shared or common then -- made only then, because making a function costs as much as a command
  join = function(holder, holders, alone, value)
    if alone then call('DEL', holders) end -- meaningless unless the holder's key says shared
    call('ZREMRANGEBYSCORE', holders, '-inf', now_ms)
    call('ZADD', holders, now_ms + ttl, secret)
    local ends = tonumber(call('ZRANGE', holders, -1, -1, 'WITHSCORES')[2])
    call('PEXPIRE', holders, ends - now_ms)
    call('SET', holder, value, 'PX', ends - now_ms)
    return ends
  end
end
if common then join(base, KEYS[r + 2], first_permit, common) end -- it is not listed, because its permits are
for i = 1, names do
  if shared then
    local ends = join(KEYS[h + i], KEYS[r + i], alone[i], SHARED .. sub(value, 33))
    if ends > now_ms + ttl then call('ZADD', index, ends, listed[2 * i]) end
    latest = math.max(latest, ends)
  else
    call('SET', KEYS[h + i], value, 'PX', ttl)
  end
end
-- From now on, late requests of the holder that was replaced are refused, in whatever order they arrive.
if cancelled then call('DEL', tombstone) end
if adopt ~= '' and adopt ~= secret then call('SET', KEYS[#KEYS], 'superseded', 'PX', 30000, 'NX') end
-- The index lives for twice as long as it must, so that few grants have to write this.
if call('PTTL', index) < latest - now_ms then call('PEXPIRE', index, 2 * (latest - now_ms)) end
-- A waiter keeps its position until it has held the lock, because other nodes may not have granted it. Where several may
-- hold the lock at once, it leaves the queue instead, so that the next waiter gets in as well.
for i in pairs(first_in_queue) do
  if passing then
    call('ZREM', KEYS[q + i], waiter)
    call('ZREM', KEYS[s + i], waiter)
    local first = call('ZRANGE', KEYS[q + i], 0, 0)[1]
    if first then call('PUBLISH', prefix .. 'w:' .. string.match(first, '^[^|]*'), first) end
  else
    call('ZADD', KEYS[s + i], now_ms + math.min(ttl, enrolment), waiter)
  end
end
-- Names of dead holders leave the index here, a few at a time; a key without expiry stays listed. Only this node knows the
-- names, so their keys are not in KEYS. A listing could drop them instead, but then the index would grow until somebody lists.
for _, slug in ipairs(call('ZRANGEBYSCORE', index, '-inf', now_ms, 'LIMIT', 0, 8)) do
  local pttl = call('PTTL', prefix .. slug .. ':h')
  if pttl == -2 then
    call('ZREM', index, slug)
  elseif pttl == -1 then
    call('ZADD', index, '+inf', slug)
  else
    call('ZADD', index, now_ms + pttl, slug)
  end
end
-- Strictly greater, and not absurdly in the future. Compare as numbers (exact below 2^53), store the text:
-- Lua's default text of such a number loses digits.
if tonumber(number) > tonumber(high) and tonumber(number) <= tonumber(stamp) + ahead then
  for i = f + 1, q do
    if keep == '' then call('SET', KEYS[i], number) else call('SET', KEYS[i], number, 'PX', keep) end
  end
  return 'ACCEPTED ' .. number .. ' ' .. stamp .. ' 0 -1 '
end
return 'GRANTED ' .. high .. ' ' .. stamp .. ' 0 -1 '
