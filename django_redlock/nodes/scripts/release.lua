-- Give a lock up, if it is ours; let a waiter leave the queue; wake who is first in it.
-- KEYS: index, cancel marker; of each name: holder, queue, enrolments; if shared, the holders of each name
-- Shared holders have a nonce each; the word that stands for all of them in the holder's key ends all their holds.
-- ARGV: nonce, bury ms, prefix, waiter that leaves ('' is none), shared, revoke ('1' or '')
local index, marker = KEYS[1], KEYS[2]
local nonce, bury, prefix, leaving, shared = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4], ARGV[5] == '1'
local SHARED = 'shared--------------------------'
local all = nonce == SHARED
local clock = redis.call('TIME')
local stamp = clock[1] .. string.format('%06d', clock[2])
local now_ms = math.floor(tonumber(stamp) / 1000)
local last = 2 + 3 * (#KEYS - 2) / (shared and 4 or 3)
redis.call('ZCARD', index)
local mine, firsts, released, taken = {}, {}, false, false
for i = 3, last, 3 do
  local current = redis.call('GET', KEYS[i])
  local owner = current and string.sub(current, 1, 32)
  local holders = KEYS[last + i / 3]
  if owner == (shared and SHARED or nonce) and (not shared or all or redis.call('ZSCORE', holders, nonce)) then
    mine[i] = true
  elseif current and not (shared and owner == SHARED) then
    taken = true
  end
  firsts[i] = redis.call('ZRANGE', KEYS[i + 1], 0, 0)[1]
end
for i in pairs(mine) do
  local slug, holders, others = string.sub(KEYS[i], #prefix + 1, -3), KEYS[last + i / 3], nil
  if shared and all then
    for _, holder in ipairs(redis.call('ZRANGE', holders, 0, -1)) do
      if bury > 0 then redis.call('SET', prefix .. 'x:' .. holder, ARGV[6] == '1' and 'stop' or '1', 'PX', bury) end
    end
    redis.call('DEL', holders)
  elseif shared then
    redis.call('ZREM', holders, nonce)
    redis.call('ZREMRANGEBYSCORE', holders, '-inf', now_ms)
    others = redis.call('ZRANGE', holders, -1, -1, 'WITHSCORES')[2]
  end
  if others then
    redis.call('PEXPIRE', holders, tonumber(others) - now_ms)
    redis.call('PEXPIRE', KEYS[i], tonumber(others) - now_ms)
    redis.call('ZADD', index, others, slug)
    mine[i] = nil
  else
    redis.call('DEL', KEYS[i])
    redis.call('ZREM', index, slug)
  end
  released = true
end
-- A request of ours may still be on its way, and must find this marker.
if bury > 0 then redis.call('SET', marker, ARGV[6] == '1' and 'stop' or '1', 'PX', bury) end
-- Only the first in line is told; a hint that is lost costs it time and nothing else.
for i, first in pairs(firsts) do
  local left = false
  if leaving ~= '' and redis.call('ZREM', KEYS[i + 1], leaving) == 1 then
    redis.call('ZREM', KEYS[i + 2], leaving)
    left = first == leaving
    first = redis.call('ZRANGE', KEYS[i + 1], 0, 0)[1]
  end
  if first and (mine[i] or left) then
    redis.call('PUBLISH', prefix .. 'w:' .. string.match(first, '^[^|]*'), first)
  end
end
return (released and 'RELEASED' or (taken and 'BUSY' or 'GONE')) .. ' 0 ' .. stamp .. ' 0 -1 '
