-- Report for how long this server has served the locks of a prefix, in microseconds.
-- A promoted replica, a restored snapshot and an emptied server may all lack locks, however long they have been running.
-- Each of them has a key of another server, or none, so the time starts anew with the first connection.
-- A server that was set to evict keys may have evicted locks, which matters when it is no longer set to, and may vote again.
-- KEYS: served, which holds the mark of this memory: "<run id>/<replication id> <since, in microseconds>"; if the server has
--       evicted keys, "x<how many>" follows the replication id
-- The reply ends with the mark. acquire.lua and extend.lua compare it with the key that stands there when they run.
local served = KEYS[1]
local clock = redis.call('TIME')
local now = clock[1] .. string.format('%06d', clock[2])
-- The script reads the ids itself: behind an endpoint that fails over, another reply could have another server's ids.
local replication = redis.call('INFO', 'replication')
local run = string.match(redis.call('INFO', 'server'), 'run_id:(%w+)') or '-'
local replica = string.match(replication, 'master_replid:(%w+)') or '-'
local known = redis.pcall('GET', served) -- a key of another type counts as none
known = type(known) == 'string' and known or ''
local ran, replicated, since = string.match(known, '^(%w+)/(%w+) (%d+)$')
local id, lost = string.match(replicated or '', '^(%w-)x(%d+)$')
replicated, lost = id or replicated, lost or '0'
local memory, evicted = redis.call('INFO', 'memory'), lost
if string.find(memory, '\nmaxmemory:0\r', 1, true) or string.find(memory, '\nmaxmemory_policy:noeviction\r', 1, true) then
  evicted = string.match(redis.call('INFO', 'stats'), 'evicted_keys:(%d+)') or '0'
  if evicted == '0' then evicted = lost end -- CONFIG RESETSTAT
end
-- A master gets another replication id in two cases: it was a replica meanwhile, or it has had no replica for an hour.
-- In the second case it has lost nothing. Only the first one leaves a second offset behind.
local stayed = replicated == replica or string.find(replication, 'second_repl_offset:-1\r', 1, true)
-- A time in the future was written before the clock was set back.
if ran ~= run or not stayed or evicted ~= lost or #since > 16 or tonumber(since) > tonumber(now) then since = now end
local present = run .. '/' .. replica .. (evicted ~= '0' and 'x' .. evicted or '') .. ' ' .. since
if known ~= present then
  redis.call('DEL', served) -- after such a write, a server whose memory is full executes the other one
  redis.call('SET', served, present)
end
return 'SERVED ' .. run .. ' ' .. string.format('%.0f', tonumber(now) - tonumber(since)) .. ' ' .. present
