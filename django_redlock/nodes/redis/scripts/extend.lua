-- Extend leases, each by itself. A lease that this node lost is restored, unless a newer token or its release is here.
-- No lease gets shorter unless the request says so, because two extensions may arrive in any order.
-- KEYS: index; of each lease: cancel tombstone, of all its names the holders, the fences, if shared the holders of each name,
--       of a permit the holder and the holders of its lock
-- ARGV: prefix, fence keep ms ('' is for ever); of each lease: names, shared (of a permit, the value that the permits of its lock
--       have in common), how ('last' for the last term, then '1' to shorten the lease), ttl ms, secret, fencing token, value; then
--       the mark that the connection learned ('' is none), see served.lua
local index, prefix, keep, mark = KEYS[1], ARGV[1], ARGV[2], ARGV[#ARGV]
-- A memory that lost this lease may have lost a later one as well, so the client learns first what it is; see acquire.lua.
if mark ~= '' and redis.call('MGET', prefix .. 'served')[1] ~= mark then return redis.error_reply('FORGOT another memory') end
local SHARED = 'shared--------------------------'
local clock = redis.call('TIME')
local stamp = clock[1] .. string.format('%06d', clock[2])
local now_ms = math.floor(tonumber(stamp) / 1000)
-- This fails if the index is of another type, before anything is written. It also counts as a write, removes nothing and takes
-- no memory: after such a write, a server whose memory is full executes the others, so that a full node keeps the leases it has.
redis.call('ZREM', index, '')

-- Keep a hold beside others, or restore it; return when the last of them ends.
local function join(holder, holders, alone, secret, ends, shorten, value)
  if alone then redis.call('DEL', holders) end -- meaningless without the holder's key
  if not shorten then ends = math.max(ends, tonumber(redis.call('ZSCORE', holders, secret) or 0)) end
  redis.call('ZADD', holders, ends, secret)
  ends = tonumber(redis.call('ZRANGE', holders, -1, -1, 'WITHSCORES')[2])
  redis.call('PEXPIRE', holders, ends - now_ms)
  redis.call('SET', holder, value, 'PX', ends - now_ms)
  return ends
end

local function extend(at, names, shared, common, how, secret, ttl, fencing_token, value)
  local shorten, last = string.sub(how, -1) == '1', string.sub(how, 1, 4) == 'last'
  local tombstone = redis.call('GET', KEYS[at])
  local stops = tombstone == 'stop'
  local high, refused, lost, holder = '0', tombstone and not (last and stops), {}, nil
  for i = at + 1, at + names do
    local current = redis.call('GET', KEYS[i])
    local fence = redis.call('GET', KEYS[names + i]) or '0'
    if tonumber(fence) > tonumber(high) then high = fence end
    local owner = current and string.sub(current, 1, #secret > 32 and 16384 or 32) -- see release.lua
    local joined = shared and redis.call('ZSCORE', KEYS[2 * names + i], secret)
    if owner and owner ~= (shared and SHARED or secret) then
      refused, holder = true, holder or current
    elseif not owner or (shared and not joined) then
      lost[i] = current and 'us' or 'all'
      if tombstone or tonumber(fence) > tonumber(fencing_token) then refused = true end
    end
  end
  local base, permits, first_permit = KEYS[at + 2 * names + 1], KEYS[at + 2 * names + 2], false
  if common then
    local current = redis.call('GET', base)
    redis.call('ZCARD', permits)
    first_permit = not current
    if current and string.sub(current, 1, 32) ~= string.sub(common, 1, 32) then
      refused, holder = true, holder or current
    end
  end
  if refused then
    -- Who has it now, for people: without the secret, and without spaces, which separate the results.
    local who = holder and '\31' .. string.gsub(string.sub(holder, 33, 2000), ' ', '\31') or ''
    return stops and 'S' or 'R', high, who
  end
  if common then join(base, permits, first_permit, secret, now_ms + ttl, shorten, common) end
  for i = at + 1, at + names do
    local ends = now_ms + ttl
    if shared then
      ends = join(KEYS[i], KEYS[2 * names + i], lost[i] == 'all', secret, ends, shorten, SHARED .. string.sub(value, 33))
    elseif lost[i] then
      redis.call('SET', KEYS[i], value, 'PX', ttl)
    else
      if not shorten then ends = now_ms + math.max(ttl, redis.call('PTTL', KEYS[i])) end
      redis.call('SET', KEYS[i], value, 'PX', ends - now_ms) -- the value counts the extensions
    end
    if lost[i] then
      local fence = KEYS[names + i]
      if keep == '' then redis.call('SET', fence, fencing_token) else redis.call('SET', fence, fencing_token, 'PX', keep) end
    elseif keep ~= '' then
      redis.call('PEXPIRE', KEYS[names + i], keep)
    end
    redis.call('ZADD', index, ends, string.sub(KEYS[i], #prefix + 1, -3))
    if redis.call('PTTL', index) < ends - now_ms then redis.call('PEXPIRE', index, ends - now_ms) end
  end
  return 'H', high, ''
end

local outcomes, held, key, top = {}, 0, 2, '0'
for i = 3, #ARGV - 1, 7 do
  local names, shared, ttl = tonumber(ARGV[i]), ARGV[i + 1] == '1', tonumber(ARGV[i + 3])
  local common = #ARGV[i + 1] > 1 and ARGV[i + 1]
  -- A key that another program has damaged ends the lease of its own lock, and no other one.
  local whole, outcome, high, who = pcall(extend, key, names, shared, common, ARGV[i + 2], ARGV[i + 4], ttl, ARGV[i + 5], ARGV[i + 6])
  if not whole then
    local what = type(outcome) == 'table' and outcome.err or outcome
    local damage = string.find(what, 'WRONGTYPE', 1, true) or string.find(what, 'attempt to', 1, true)
    if not damage and not string.find(what, 'not a', 1, true) then error(outcome, 0) end -- such as a right that is missing
    outcome, high, who = 'R', '0', ''
  end
  if outcome == 'H' then held = held + 1 end
  if tonumber(high) > tonumber(top) then top = high end
  outcomes[#outcomes + 1] = outcome .. high .. who
  key = key + 1 + names * (shared and 3 or 2) + (common and 2 or 0)
end
local kind = held == #outcomes and 'HELD ' or (held == 0 and 'REFUSED ' or 'MIXED ')
return kind .. top .. ' ' .. stamp .. ' 0 -1 ' .. table.concat(outcomes, ' ')
