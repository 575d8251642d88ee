-- Report locks: the names given, with their waiters and sharers, or one page of the index in the order of expiry. The first
-- page also reports why the node would take no lock. Each step is bounded, whatever other programs have written, because
-- a long command makes all clients wait.
-- KEYS: index; of the names given the holders and the fences, and if waiters are asked for the holders of each name, the queues
-- and the enrolments; on the first page a probe. The keys of a page's names are not in KEYS: only this node knows the names.
-- ARGV: prefix, cursor of the page before ('' is none), size of the page (0 is the names given), waiters to name at most
--       ('' does not even count them, nor sharers), then slugs
local SHARED = 'shared--------------------------'
local LONGEST_VALUE, LONGEST_SLUG, LONGEST_WAITER = 16384, 10000, 500
local LONGEST_TEXT, LONGEST_OURS, CUT = 1000000, 500, 1000
local FEW = 10 -- waiters among which one that is alive is looked for
local index, prefix, after, size, left = KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local clock = redis.call('TIME')
local stamp = clock[1] .. string.format('%06d', clock[2])
local now_ms = math.floor(tonumber(stamp) / 1000)
local total = redis.call('ZCARD', index)
local slugs, cursor = {}, ''
for i = 5, #ARGV do slugs[#slugs + 1] = ARGV[i] end

-- A page begins behind the position that the last name of the previous page had. If pages were counted by number, names
-- would be skipped as others before them move to the end.
if size > 0 then
  local from, score, last = 0, string.match(after, '^(%S+) (.*)$')
  if last and redis.call('ZSCORE', index, last) == score then
    from = redis.call('ZRANK', index, last) + 1
  elseif last then
    local first = redis.call('ZRANGEBYSCORE', index, score, '+inf', 'LIMIT', 0, 1)[1]
    from = first and redis.call('ZRANK', index, first) or total
  end
  for _, slug in ipairs(redis.call('ZRANGE', index, from, from + size - 1)) do
    if #slug <= LONGEST_SLUG then slugs[#slugs + 1] = slug end -- no name of ours is longer
  end
  last = slugs[#slugs]
  if from + size < total then
    cursor = last and redis.call('ZSCORE', index, last) .. ' ' .. last or after ~= '' and after or '-inf '
  end
end

-- How many members of a sorted set have not expired; the others died, or gave up without a release. Without the right to look,
-- there are none.
local function alive(key)
  local first = redis.pcall('ZRANGEBYSCORE', key, '(' .. now_ms, '+inf', 'LIMIT', 0, 1)[1]
  return first and redis.call('ZCARD', key) - redis.call('ZRANK', key, first) or 0
end

-- How many callers wait for a lock, the first of them and since when it waits, how many holders share the lock, and which of
-- its keys are of another type.
-- Most locks have no other keys than the two that have been read: one command finds that out.
local function around(slug, value, fence, pttl)
  local base, odd = prefix .. (string.match(slug, '^(.+)#%d+$') or slug), {}
  local queue, enrolments, sharers, counter = base .. ':q', base .. ':s', prefix .. slug .. ':r', prefix .. slug .. ':f'
  if not value and pttl ~= -2 then odd[1] = prefix .. slug .. ':h' end
  local others = redis.pcall('EXISTS', queue, enrolments, sharers, not fence and counter or sharers)
  if type(others) ~= 'number' or others == 0 then return 0, '', 0, '0', odd end
  if not fence and redis.call('EXISTS', counter) == 1 then odd[#odd + 1] = counter end
  local sets, listed, since = {}, {}, nil
  for _, key in ipairs({queue, enrolments, sharers}) do
    local reply = redis.pcall('ZCARD', key)
    sets[key] = type(reply) == 'number'
    if not sets[key] and string.find(reply.err, 'WRONGTYPE') then odd[#odd + 1] = key end
  end
  local count = sets[enrolments] and alive(enrolments) or 0
  if count > 0 and sets[queue] then
    local named = value and value ~= ''
    local members = redis.pcall('ZRANGE', queue, 0, math.max(named and 2 * left or 0, FEW) - 1, 'WITHSCORES')
    for at = 1, #members, 2 do
      local waiter, stamp = members[at], members[at + 1]
      local wanted = #waiter <= LONGEST_WAITER and (not since or named and left > 0)
      local ends = wanted and redis.pcall('ZSCORE', enrolments, waiter)
      if type(ends) == 'string' and tonumber(ends) > now_ms then
        local began = tonumber(stamp)
        since = since or (began >= 0 and began <= 9007199254740991 and string.format('%.0f', began) or '0')
        if named and left > 0 then listed[#listed + 1], left = waiter, left - 1 end
      end
    end
  end
  local several = sets[sharers] and string.sub(value or '', 1, 32) == SHARED
  return count, table.concat(listed, ' '), several and alive(sharers) or 0, since or '0', odd
end

-- One command for all values, because the number of commands costs most. The value of a key of another type is empty.
local keys, cells, lines = {}, {}, {}
for i, slug in ipairs(slugs) do
  keys[2 * i - 1], keys[2 * i] = prefix .. slug .. ':h', prefix .. slug .. ':f'
end
local values = {}
for first = 1, #keys, 1000 do -- Lua takes some thousand arguments at most
  for _, value in ipairs(redis.call('MGET', unpack(keys, first, math.min(first + 999, #keys)))) do
    values[#values + 1] = value
  end
end
for i, slug in ipairs(slugs) do
  local value, fence, at = values[2 * i - 1] or '', values[2 * i] or '0', 4 * i
  if #value > LONGEST_VALUE then value = string.sub(value, 1, LONGEST_VALUE) end
  if #fence > 16 then fence = '9007199254740992' end -- absurd: one more than these scripts can count
  local pttl = redis.call('PTTL', keys[2 * i - 1])
  cells[at - 3], cells[at - 2], cells[at - 1], cells[at] = slug, value, pttl, fence
  if left then
    local count, listed, several, since, odd = around(slug, values[2 * i - 1], values[2 * i], pttl)
    lines[5 * i - 4], lines[5 * i - 3], lines[5 * i - 2], lines[5 * i - 1] = count, listed, several, since
    lines[5 * i] = #odd > 0 and #slug <= LONGEST_OURS and odd or ''
  end
end
-- A node can answer and yet take no lock: it is full, or has lost its disk, its replicas or a right. So try the commands that a
-- free lock takes (see acquire.lua), in such a way that they change nothing. The first one is a write that a full server
-- refuses, because after any other write it would refuse none.
local refused, probe = '', prefix .. 'x:probe'
local needed = size > 0 and after == '' and {
  {'ZADD', index, 'XX', 0, ''}, {'SET', probe, '1', 'XX', 'PX', 1}, {'PEXPIRE', probe, 1},
  {'MGET', probe}, {'EXISTS', probe}, {'PTTL', probe}, {'ZRANGEBYSCORE', index, 1, 0},
} or {}
for _, command in ipairs(needed) do
  local reply = redis.pcall(unpack(command))
  if refused == '' and type(reply) == 'table' and reply.err then refused = reply.err end
end
-- One string, because a client takes longer to read hundreds of them than the server to find them.
local function json(list) return #list > 0 and cjson.encode(list) or '[]' end
local text = json(cells)
if #text > LONGEST_TEXT then -- only values of other programs are so long, and a client reads no longer reply
  for at = 2, #cells, 4 do cells[at] = string.sub(cells[at], 1, CUT) end
  text = json(cells)
end
return {'LISTED', '0', stamp, tostring(total), text, json(lines), refused, cursor}
