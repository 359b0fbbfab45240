-- Sends requests for random keys (mode "random"), or for all keys one after the other, to exhaust
-- them (mode "each"). The arguments are the JSON body, the number of keys and the mode. The body
-- contains the placeholder KEY and, optionally, UNITS for the cost.

local threads = 0

function setup(thread)
   thread:set("number", threads)
   threads = threads + 1
end

function init(arguments)
   local template, keys, mode = arguments[1], tonumber(arguments[2]), arguments[3]
   math.randomseed(number + 1)
   wrk.method = "POST"
   wrk.headers["Content-Type"] = "application/json"
   requests = {}
   for key = 0, keys - 1 do
      -- All requests are built before the run, so that wrk uses less CPU time, which the server
      -- needs.
      local body = template:gsub("KEY", string.format("%012d", key)):gsub("UNITS", key % 500 + 1)
      requests[#requests + 1] = wrk.format(nil, nil, nil, body)
   end
   -- Both threads visit all keys, but start with different halves.
   turn = mode == "each" and number * math.floor(keys / 2) or nil
end

function request()
   if turn == nil then
      return requests[math.random(#requests)]
   end
   turn = turn % #requests + 1
   return requests[turn]
end
