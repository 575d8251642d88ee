-- Release a lock if it is ours, take a waiter out of the queue, and notify the first waiter.
-- KEYS: index, cancel tombstone; of all names the holders, the queues, the enrolments; if shared, the holders of each name;
--       if the token counts, the fences; of a permit, the holder and the holders of its lock
-- Each shared holder has a secret. The word that the holder's key has in place of a secret ends the holds of all, unless one
-- joined with a later token. An exclusive hold with a later token, but the same secret, is not ended either.
-- ARGV: secret, waiter that leaves ('' is none), fencing token of the hold, or of the last holder that joined (2^53 - 1 is any),
--       prefix, tombstone ms, shared ('1', '' or, of a permit, 'permit'), revoke ('1' or '')
local call, sub = redis.call, string.sub
local index, tombstone = KEYS[1], KEYS[2]
local secret, leaving, prefix, tombstone_ms, shared = ARGV[1], ARGV[2], ARGV[4], tonumber(ARGV[5]), ARGV[6] == '1'
local SHARED = 'shared--------------------------'
local size = #secret > 32 and 16384 or 32 -- an operator's request for a value that is not ours has as much of it as surveys report
local any = ARGV[3] == '9007199254740991'
local all, last, word = shared and secret == SHARED, tonumber(ARGV[3]), ARGV[7] == '1' and 'stop' or '1'
local clock = call('TIME')
local stamp = clock[1] .. string.format('%06d', clock[2])
local now_ms = math.floor(tonumber(stamp) / 1000)
local permit = ARGV[6] == 'permit'
local last_key = #KEYS - (permit and 2 or 0)
local names = (last_key - 2) / (3 + (shared and 1 or 0) + (any and 0 or 1))
local h, q, s, r = 2, 2 + names, 2 + 2 * names, 2 + 3 * names -- the index before each kind of key
if shared then call('ZCARD', index) end -- otherwise the first write goes there
-- A permit leaves those that hold its lock, unless others hold it by now.
local base, permits, joined = KEYS[last_key + 1], KEYS[last_key + 2], false
if permit then joined = call('ZSCORE', permits, secret) and string.match(call('GET', base) or '', '^limit%-') end
-- With several names, read all holders at once, and look for waiters once; see acquire.lua.
local strings, plain = nil, names > 1 and not shared
if plain then
  strings = call('MGET', unpack(KEYS, h + 1, q))
  local found = 0
  for i = 1, names do
    if strings[i] then found = found + 1 end
  end
  plain = call('EXISTS', unpack(KEYS, h + 1, s)) == found
end
local leave -- takes the hold away from those beside it, and returns when the last of them ends
if shared or joined then -- made only then, because making a function costs as much as a command
  leave = function(holder, holders)
    call('ZREM', holders, secret)
    call('ZREMRANGEBYSCORE', holders, '-inf', now_ms)
    local ends = call('ZRANGE', holders, -1, -1, 'WITHSCORES')[2]
    if ends then
      call('PEXPIRE', holders, tonumber(ends) - now_ms)
      call('PEXPIRE', holder, tonumber(ends) - now_ms)
    end
    return ends
  end
end
local mine, firsts, keys, slugs, released, taken, later = {}, {}, {}, {}, false, false, false
for i = 1, names do
  local current
  if plain then
    current = strings[i]
  else
    current = call('GET', KEYS[h + i])
    firsts[i] = call('ZRANGE', KEYS[q + i], 0, 0)[1]
  end
  local owner = current and sub(current, 1, size)
  local ours = owner == (shared and SHARED or secret)
  if ours and not any and (all or not shared) then
    ours = (tonumber(call('GET', KEYS[last_key - names + i]) or 0) or 0) <= last
    later = later or not (ours or shared)
  end
  if ours and shared and not all then
    ours = call('ZSCORE', KEYS[r + i], secret)
  end
  if ours then
    mine[i] = true
  elseif current and (all or not (shared and owner == SHARED)) then
    taken = taken or sub(current, 33, 2000)
  end
end
for i in pairs(mine) do
  local slug, holders, others = sub(KEYS[h + i], #prefix + 1, -3), KEYS[r + i], nil
  if shared and all then
    -- Their tombstones are not in KEYS: a secret proves a hold, so surveys do not report the secrets of those who share.
    for _, holder in ipairs(call('ZRANGE', holders, 0, -1)) do
      if tombstone_ms > 0 then call('SET', prefix .. 'x:' .. holder, word, 'PX', tombstone_ms) end
    end
    call('DEL', holders)
  elseif shared then
    others = leave(KEYS[h + i], holders)
  end
  if others then
    call('ZADD', index, others, slug)
    mine[i] = nil
  else
    keys[#keys + 1], slugs[#slugs + 1] = KEYS[h + i], slug
  end
  released = true
end
if #keys > 0 then
  call('ZREM', index, unpack(slugs)) -- first: if the index is of another type, nothing has been written
  call('DEL', unpack(keys))
end
if joined and not leave(base, permits) then call('DEL', base) end
-- Only the first waiter is notified; a notification that is lost only costs time.
for i, first in pairs(firsts) do
  local left = false
  if leaving ~= '' and call('ZREM', KEYS[q + i], leaving) == 1 then
    call('ZREM', KEYS[s + i], leaving)
    left = first == leaving
    first = call('ZRANGE', KEYS[q + i], 0, 0)[1]
  end
  if first and (mine[i] or left) then
    call('PUBLISH', prefix .. 'w:' .. string.match(first, '^[^|]*'), first)
  end
end
-- If nothing was left to release, the holder learns whether an operator took it away.
local why = not released and (taken or (call('GET', tombstone) == 'stop' and 'stop')) or ''
-- A request of ours may still be in flight, and must find this tombstone; a later hold must not, whose extensions it would refuse.
-- It is written last: a server whose memory is full refuses it, unless something has been removed before.
if tombstone_ms > 0 and not later then call('SET', tombstone, word, 'PX', tombstone_ms) end
return (released and 'RELEASED' or (taken and 'BUSY' or 'GONE')) .. ' 0 ' .. stamp .. ' 0 -1 ' .. why
