-- Replace an absurd fencing token, if it is still there; a valid one does not change.
-- KEYS: index, holder, fence. ARGV: slug, number to write ('0' is none), fence keep ms ('' is for ever), by how many µs
-- a token may be ahead of the clock
local index, holder, fence = KEYS[1], KEYS[2], KEYS[3]
local slug, number, keep = ARGV[1], ARGV[2], ARGV[3]
local clock = redis.call('TIME')
local stamp = clock[1] .. string.format('%06d', clock[2])
redis.call('ZCARD', index)
local held, present = redis.call('EXISTS', holder) == 1, redis.call('GET', fence)
local sound = not present
if present and #present <= 16 and string.match(present, '^%d+$') then
  local value = tonumber(present)
  sound = value < 9007199254740991 and value <= tonumber(stamp) + tonumber(ARGV[4])
end
if sound then return 'GONE 0 ' .. stamp .. ' 0 -1 ' end
if number == '0' then
  redis.call('DEL', fence)
elseif keep == '' then
  redis.call('SET', fence, number)
else
  redis.call('SET', fence, number, 'PX', keep)
end
if not held then redis.call('ZREM', index, slug) end
return 'RELEASED 0 ' .. stamp .. ' 0 -1 '
