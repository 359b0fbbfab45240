//! Tests that the work of the scripts is bounded, even for the largest inputs. An embedded Lua
//! interpreter counts the instructions, so no test measures time.

use std::{
    collections::HashMap,
    future::ready,
    pin::Pin,
    sync::{Arc, Mutex},
};

use mlua::{HookTriggers, Lua, MultiValue, Value as LuaValue, VmState};
use tidegate_core::{
    Algorithm, Charge, Cost, Counting, Decision, Effect, Limit, Limits, Rate, RefillMode,
    Settlement, Span, Timestamp, Window, bounds,
};

use super::{BLOCK_INDEX, CENSUS, DENIALS, READ, REPLACE, Script, TOP};
use crate::{
    RedisReceipt, RedisStore,
    call::{Call, Reply},
    exec::{ExecError, Executor, Replies},
};

/// The amount of work that one script call does.
#[derive(Clone, Copy, Debug, Default)]
struct Work {
    /// Instructions executed by the Lua virtual machine.
    instructions: u64,
    /// The number of bytes that the script allocates or exchanges with Redis.
    bytes: u64,
    /// Size of the reply in bytes.
    reply_bytes: usize,
}

/// Runs scripts in this process, on keys that never expire.
struct Machine {
    lua: Lua,
    keys: Arc<Mutex<HashMap<Vec<u8>, Vec<u8>>>>,
    instructions: Arc<Mutex<u64>>,
    moved: Arc<Mutex<u64>>,
    work: Mutex<Work>,
    /// The number of script calls so far.
    calls: Mutex<u64>,
    /// The values that other clients write to a key before each call.
    written_by_others: Mutex<Option<Overwrite>>,
}

/// Values that are written to a key in turn.
struct Overwrite {
    key: Vec<u8>,
    values: [Vec<u8>; 2],
}

impl std::fmt::Debug for Machine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Machine")
    }
}

type LuaResult<T> = mlua::Result<T>;

/// Returns the size in bytes of each field in a `struct` format, and whether the field is a string.
fn sizes(format: &[u8]) -> Vec<(usize, bool)> {
    let text = std::str::from_utf8(format).unwrap();
    let fields = text.trim_start_matches('>').split(['I', 'c']).skip(1);
    let kinds = text.matches(['I', 'c']);
    let sizes = kinds.zip(fields).map(|(kind, size)| match size.parse() {
        Ok(size) => (size, kind == "c"),
        Err(_) => panic!("the format {text} is not known here"),
    });
    sizes.collect()
}

fn unpack(
    lua: &Lua,
    (format, bytes, at): (mlua::LuaString, mlua::LuaString, Option<usize>),
) -> LuaResult<MultiValue> {
    let (bytes, mut at) = (bytes.as_bytes(), at.unwrap_or(1));
    let mut values = Vec::new();
    for (size, is_text) in sizes(&format.as_bytes()) {
        let part = bytes.get(at - 1..at - 1 + size);
        let part = part.ok_or_else(|| mlua::Error::runtime("data string too short"))?;
        at += size;
        values.push(if is_text {
            LuaValue::String(lua.create_string(part)?)
        } else {
            let number = part
                .iter()
                .fold(0_u64, |sum, byte| sum << 8 | u64::from(*byte));
            LuaValue::Number(exact(number))
        });
    }
    values.push(LuaValue::Number(exact(at as u64)));
    Ok(MultiValue::from_vec(values))
}

#[expect(clippy::cast_precision_loss, reason = "Lua numbers are doubles")]
fn exact(number: u64) -> f64 {
    number as f64
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "as the `struct` library does"
)]
fn whole_number(value: &LuaValue) -> u64 {
    match value {
        LuaValue::Integer(number) => *number as u64,
        LuaValue::Number(number) => *number as u64,
        other => panic!("{other:?} is not a number"),
    }
}

fn pack(lua: &Lua, values: MultiValue) -> LuaResult<mlua::LuaString> {
    let mut values = values.into_iter();
    let Some(LuaValue::String(format)) = values.next() else {
        panic!("a format comes first");
    };
    let mut bytes = Vec::new();
    for ((size, is_text), value) in sizes(&format.as_bytes()).into_iter().zip(values) {
        match &value {
            // The format `c0` stands for the whole string.
            LuaValue::String(text) if is_text && size == 0 => {
                bytes.extend_from_slice(&text.as_bytes());
            }
            LuaValue::String(text) if is_text => bytes.extend_from_slice(&text.as_bytes()[..size]),
            number => bytes.extend_from_slice(&whole_number(number).to_be_bytes()[8 - size..]),
        }
    }
    lua.create_string(bytes)
}

/// Decodes the part of MessagePack that receipts use.
#[expect(
    clippy::needless_pass_by_value,
    reason = "mlua calls it with owned values"
)]
fn unpack_message(lua: &Lua, bytes: mlua::LuaString) -> LuaResult<LuaValue> {
    fn number(input: &mut &[u8], size: usize) -> u64 {
        let (bytes, rest) = input.split_at(size);
        *input = rest;
        bytes
            .iter()
            .fold(0, |sum, byte| sum << 8 | u64::from(*byte))
    }
    fn value(lua: &Lua, input: &mut &[u8]) -> LuaResult<LuaValue> {
        let kind = u8::try_from(number(input, 1)).unwrap();
        let items = match kind {
            0x90..=0x9F => usize::from(kind & 15),
            0xDC => usize::try_from(number(input, 2)).unwrap(),
            _ => usize::MAX,
        };
        if items < usize::MAX {
            let table = lua.create_table()?;
            for item in 1..=items {
                table.raw_set(item, value(lua, input)?)?;
            }
            return Ok(LuaValue::Table(table));
        }
        let size = match kind {
            0xA0..=0xBF => usize::from(kind & 31),
            0xDA => usize::try_from(number(input, 2)).unwrap(),
            0xCE => return Ok(LuaValue::Number(exact(number(input, 4)))),
            0xCF => return Ok(LuaValue::Number(exact(number(input, 8)))),
            0..0x80 => return Ok(LuaValue::Number(exact(kind.into()))),
            _ => panic!("{kind:#x} is not known here"),
        };
        let (text, rest) = input.split_at(size);
        *input = rest;
        lua.create_string(text).map(LuaValue::String)
    }
    value(lua, &mut &*bytes.as_bytes())
}

#[expect(
    clippy::needless_pass_by_value,
    reason = "mlua calls it with owned values"
)]
fn pack_message(lua: &Lua, table: mlua::Table) -> LuaResult<mlua::LuaString> {
    let mut bytes = vec![0xDC];
    bytes.extend(u16::try_from(table.raw_len()).unwrap().to_be_bytes());
    for item in table.sequence_values::<LuaValue>() {
        match &item? {
            LuaValue::String(text) => {
                bytes.push(0xDA);
                bytes.extend(u16::try_from(text.as_bytes().len()).unwrap().to_be_bytes());
                bytes.extend_from_slice(&text.as_bytes());
            }
            number => {
                bytes.push(0xCF);
                bytes.extend(whole_number(number).to_be_bytes());
            }
        }
    }
    lua.create_string(bytes)
}

/// The maximum number of hash or set entries that a script reads with one Redis command.
const PAGE: usize = 1_000;

/// Converts a Redis reply in the same way as the Lua API of Redis. Returns the value, and the total
/// length of its strings in bytes.
fn lua_value(lua: &Lua, reply: Reply) -> LuaResult<(LuaValue, usize)> {
    Ok(match reply {
        Reply::Nil => (LuaValue::Boolean(false), 0),
        Reply::Int(number) => (LuaValue::Integer(number), 0),
        Reply::BulkString(bytes) => (LuaValue::String(lua.create_string(&bytes)?), bytes.len()),
        Reply::Array(replies) => {
            let (table, mut sum) = (lua.create_table()?, 0);
            for reply in replies {
                let (value, bytes) = lua_value(lua, reply)?;
                table.raw_push(value)?;
                sum += bytes;
            }
            (LuaValue::Table(table), sum)
        }
        _ => (LuaValue::Boolean(true), 0),
    })
}

/// Executes the Redis commands that the scripts use.
fn command(keys: &mut HashMap<Vec<u8>, Vec<u8>>, words: &[Vec<u8>]) -> Reply {
    let number = |at: usize| {
        std::str::from_utf8(&words[at])
            .unwrap()
            .parse::<usize>()
            .unwrap()
    };
    let ok = Reply::Okay;
    match words[0].as_slice() {
        b"GET" => keys
            .get(&words[1])
            .map_or(Reply::Nil, |value| Reply::BulkString(value.clone())),
        b"SET" => {
            keys.insert(words[1].clone(), words[2].clone());
            ok
        }
        b"PSETEX" => {
            keys.insert(words[1].clone(), words[3].clone());
            ok
        }
        b"DEL" => Reply::Int(keys.remove(&words[1]).map_or(0, |_| 1)),
        b"PTTL" => Reply::Int(if keys.contains_key(&words[1]) {
            1 << 40
        } else {
            -2
        }),
        b"PEXPIRE" => Reply::Int(1),
        b"GETRANGE" => {
            let value = keys.get(&words[1]).map_or(&[][..], Vec::as_slice);
            let (from, upto) = (number(2), (number(3) + 1).min(value.len()));
            Reply::BulkString(value.get(from..upto).unwrap_or_default().to_vec())
        }
        b"SETRANGE" => {
            let value = keys.entry(words[1].clone()).or_default();
            let end = number(2) + words[3].len();
            value.resize(value.len().max(end), 0);
            value[number(2)..end].copy_from_slice(&words[3]);
            ok
        }
        // One command returns at most a page of a hash or a set.
        b"HMGET" => Reply::Array(words[2..].iter().map(|_| Reply::Nil).collect()),
        b"HSCAN" => {
            let ended = || Reply::BulkString([&[0, 0, 0, 0, 0, 0, 1][..], b"note"].concat());
            let entry = |number: usize| [Reply::BulkString(number.to_string().into()), ended()];
            let entries = (0..PAGE).flat_map(entry).collect();
            Reply::Array(vec![Reply::BulkString(b"0".into()), Reply::Array(entries)])
        }
        b"ZREVRANGEBYSCORE" => {
            let id = |number: usize| Reply::BulkString(number.to_string().into());
            Reply::Array((0..PAGE).map(id).collect())
        }
        b"TIME" => Reply::Array(vec![
            Reply::BulkString(b"1767225600".into()),
            Reply::BulkString(b"0".into()),
        ]),
        b"HDEL" | b"HSET" | b"ZADD" | b"ZREMRANGEBYSCORE" | b"ZREMRANGEBYRANK" | b"ZCARD" => {
            Reply::Int(1)
        }
        other => panic!("{} is not known here", other.escape_ascii()),
    }
}

impl Machine {
    fn new() -> LuaResult<Self> {
        let lua = Lua::new();
        let machine = Self {
            lua: lua.clone(),
            keys: Arc::default(),
            instructions: Arc::default(),
            moved: Arc::default(),
            work: Mutex::default(),
            calls: Mutex::default(),
            written_by_others: Mutex::default(),
        };
        let (keys, moved) = (Arc::clone(&machine.keys), Arc::clone(&machine.moved));
        let call = lua.create_function(move |lua, words: MultiValue| {
            let words = words.into_iter().map(|word| {
                let word = lua.coerce_string(word)?.unwrap();
                Ok(word.as_bytes().to_vec())
            });
            let words: Vec<Vec<u8>> = words.collect::<LuaResult<_>>()?;
            let sent: usize = words.iter().map(Vec::len).sum();
            let reply = command(&mut keys.lock().unwrap(), &words);
            let (value, received) = lua_value(lua, reply)?;
            *moved.lock().unwrap() += (sent + received) as u64;
            Ok(value)
        })?;
        let globals = lua.globals();
        let redis = lua.create_table()?;
        redis.set("call", call)?;
        globals.set("redis", redis)?;
        let structs = lua.create_table()?;
        structs.set("pack", lua.create_function(pack)?)?;
        structs.set("unpack", lua.create_function(unpack)?)?;
        globals.set("struct", structs)?;
        let messages = lua.create_table()?;
        messages.set("pack", lua.create_function(pack_message)?)?;
        messages.set("unpack", lua.create_function(unpack_message)?)?;
        globals.set("cmsgpack", messages)?;
        let instructions = Arc::clone(&machine.instructions);
        let every = HookTriggers::new().every_nth_instruction(1);
        lua.set_hook(every, move |_, _| {
            *instructions.lock().unwrap() += 1;
            Ok(VmState::Continue)
        })?;
        Ok(machine)
    }

    fn run_one(&self, call: &Call) -> LuaResult<Reply> {
        if let Some(Overwrite { key, values }) = &mut *self.written_by_others.lock().unwrap() {
            values.swap(0, 1);
            let mut keys = self.keys.lock().unwrap();
            keys.insert(key.clone(), values[0].clone());
        }
        let globals = self.lua.globals();
        for (name, words) in [("KEYS", &call.keys), ("ARGV", &call.args)] {
            let table = self.lua.create_table()?;
            for word in words {
                table.raw_push(self.lua.create_string(word)?)?;
            }
            globals.set(name, table)?;
        }
        let script = self.lua.load(&call.script.text).into_function()?;
        self.lua.gc_collect()?;
        self.lua.gc_stop();
        *self.instructions.lock().unwrap() = 0;
        *self.moved.lock().unwrap() = 0;
        let before = self.lua.used_memory();
        let reply = script.call::<LuaValue>(());
        let allocated = self.lua.used_memory().saturating_sub(before) as u64;
        self.lua.gc_restart();
        let reply = reply_of(reply?);
        *self.calls.lock().unwrap() += 1;
        *self.work.lock().unwrap() = Work {
            instructions: *self.instructions.lock().unwrap(),
            bytes: allocated + *self.moved.lock().unwrap(),
            reply_bytes: bytes_of(&reply),
        };
        Ok(reply)
    }
}

/// Returns the total length of all strings in a reply, in bytes.
fn bytes_of(reply: &Reply) -> usize {
    match reply {
        Reply::BulkString(text) => text.len(),
        Reply::Array(items) => items.iter().map(bytes_of).sum(),
        _ => 0,
    }
}

fn reply_of(value: LuaValue) -> Reply {
    match value {
        LuaValue::String(text) => Reply::BulkString(text.as_bytes().to_vec()),
        LuaValue::Table(table) => {
            let items = table.sequence_values::<LuaValue>();
            Reply::Array(items.map(|item| reply_of(item.unwrap())).collect())
        }
        LuaValue::Nil | LuaValue::Boolean(false) => Reply::Nil,
        number => Reply::Int(i64::try_from(whole_number(&number)).unwrap()),
    }
}

impl Executor for Machine {
    fn run<'a>(&'a self, calls: &'a [Call]) -> Pin<Box<dyn Future<Output = Replies> + Send + 'a>> {
        let replies = calls.iter().map(|call| {
            let reply = self.run_one(call);
            reply.map_err(|error| ExecError::Refused(error.to_string()))
        });
        Box::pin(ready(replies.collect()))
    }

    fn is_cluster(&self) -> bool {
        false
    }

    fn servers(&self) -> Result<Vec<String>, ExecError> {
        Ok(Vec::new())
    }

    fn run_on<'a>(
        &'a self,
        _server: &'a str,
        _command: redis::Cmd,
    ) -> Pin<Box<dyn Future<Output = Result<Reply, ExecError>> + Send + 'a>> {
        let problem = "only scripts run here".to_owned();
        Box::pin(ready(Err(ExecError::Refused(problem))))
    }
}

/// A store whose scripts run in a [`Machine`], so that their work is counted.
struct Bench {
    store: RedisStore,
    machine: Arc<Machine>,
    runtime: tokio::runtime::Runtime,
    now: u64,
}

impl Bench {
    fn new() -> Self {
        let machine = Arc::new(Machine::new().unwrap());
        let executor: Arc<dyn Executor> = machine.clone();
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let mut bench = Self {
            store: RedisStore::with_executor(executor, b"tg"),
            machine,
            runtime: runtime.build().unwrap(),
            now: 1_767_225_600_000_000,
        };
        bench.pass(0);
        bench
    }

    fn pass(&mut self, micros: u64) {
        self.now += micros;
        self.store.pin_clock(Timestamp::from_micros(self.now));
    }

    fn work(&self) -> Work {
        *self.machine.work.lock().unwrap()
    }

    /// Makes a decision, checks that the decision is `expected`, and returns the work of the last
    /// script call.
    fn ask(&self, charges: &[Charge<'_>], effect: Effect, expected: Decision) -> Work {
        let mut outcomes = Vec::new();
        let decided = self.store.check(charges, effect, &mut outcomes);
        assert_eq!(self.runtime.block_on(decided), Ok(expected));
        self.work()
    }

    /// Decides a request with one charge. Returns the decision, the number of script calls that the
    /// decision took, and the work of the last call.
    fn calls_of(&self, charge: Charge<'_>) -> (Decision, u64, Work) {
        let calls = || *self.machine.calls.lock().unwrap();
        let (before, mut outcomes) = (calls(), Vec::new());
        let charges = [charge];
        let decided = self.store.check(&charges, Effect::Charge, &mut outcomes);
        let decision = self.runtime.block_on(decided).unwrap();
        (decision, calls() - before, self.work())
    }

    /// Returns the value of the key `key`.
    fn value(&self) -> Vec<u8> {
        let keys = self.machine.keys.lock().unwrap();
        keys.get(&self.store.key(b"key"))
            .cloned()
            .unwrap_or_default()
    }

    fn reserve(&self, charges: &[Charge<'_>]) -> (RedisReceipt, Work) {
        let mut outcomes = Vec::new();
        let reserved = self.store.reserve(charges, &mut outcomes);
        let (decision, receipt) = self.runtime.block_on(reserved).unwrap();
        assert_eq!(decision, Decision::Admitted);
        (receipt, self.work())
    }

    fn settle(&self, charges: &[Charge<'_>], receipt: RedisReceipt) -> Work {
        let settlements = vec![Settlement { unused: u64::MAX }; charges.len()];
        let settled = self.store.settle(charges, receipt, &settlements);
        self.runtime.block_on(settled).unwrap();
        self.work()
    }

    fn renew(&self, charges: &[Charge<'_>], receipt: &mut RedisReceipt) -> Work {
        let renewed = self.store.renew(charges, receipt);
        assert_eq!(
            self.runtime.block_on(renewed),
            Ok(tidegate_core::Renewal::Held)
        );
        self.work()
    }
}

fn limits(algorithms: &[Algorithm], count_denied: bool) -> Limits {
    let limit = |algorithm: &Algorithm| {
        let limit = Limit::new(algorithm.clone()).unwrap();
        limit.counting_denied(count_denied)
    };
    Limits::new(algorithms.iter().map(limit).collect()).unwrap()
}

fn charge<'c>(limits: &'c Limits, key: &'c [u8], cost: u64) -> Charge<'c> {
    Charge::new(key, limits, Cost::new(cost).unwrap()).unwrap()
}

const DAY: Span = Span::from_secs(86_400);

/// Returns one algorithm of each kind, with 100 units per day.
fn every_kind() -> Vec<Algorithm> {
    let rate = Rate {
        count: 100,
        period: DAY,
    };
    let counter = |counting| Algorithm::SlidingWindowCounter {
        limit: 100,
        window: DAY,
        counting,
    };
    vec![
        Algorithm::Gcra { rate, burst: 99 },
        Algorithm::TokenBucket {
            capacity: 100,
            refill: rate,
            mode: RefillMode::Interval,
        },
        Algorithm::LeakyBucket {
            capacity: 99,
            leak: rate,
            queue: true,
        },
        Algorithm::FixedWindow {
            limit: 100,
            window: Window::Epoch(DAY),
        },
        Algorithm::FixedWindow {
            limit: 100,
            window: Window::FirstRequest(DAY),
        },
        Algorithm::SlidingWindowLog {
            limit: 100,
            window: DAY,
        },
        Algorithm::Concurrency {
            limit: 100,
            lease: DAY,
        },
        counter(Counting::Weighted),
        counter(Counting::Buckets {
            buckets: 10,
            strict: true,
        }),
        counter(Counting::Buckets {
            buckets: bounds::MAX_BUCKETS,
            strict: true,
        }),
    ]
}

/// Asserts that a denial takes at most 1.5 times as many instructions and bytes as an admission. If
/// denied requests are counted, a denial takes at most 2.5 times as many, because a counted denial
/// fills the state completely.
#[test]
fn a_denial_costs_redis_at_most_an_admission() {
    for algorithm in every_kind() {
        for count_denied in [false, true] {
            let (mut bench, limits) = (
                Bench::new(),
                limits(std::slice::from_ref(&algorithm), count_denied),
            );
            let one = charge(&limits, b"key", 1);
            let charges = [one];
            let (mut admitted, mut outcomes) = (Work::default(), Vec::new());
            // The admitted requests are spread over at most half of the window. The loop ends with
            // the first denied request.
            let denied = loop {
                let decided = bench.store.check(&charges, Effect::Charge, &mut outcomes);
                if bench.runtime.block_on(decided).unwrap() != Decision::Admitted {
                    break bench.work();
                }
                admitted = bench.work();
                bench.pass(DAY.as_micros() / 250);
            };
            let (most, of) = if count_denied { (5, 2) } else { (3, 2) };
            assert!(
                denied.instructions * of <= admitted.instructions * most,
                "{algorithm:?} {denied:?} {admitted:?}"
            );
            assert!(
                denied.bytes * of <= admitted.bytes * most,
                "{algorithm:?} {denied:?} {admitted:?}"
            );
        }
    }
}

/// A limit or a charge denies the request after other limits or charges with long states have
/// admitted it. The denial costs only as much as a peek, because the script does not build a long
/// state.
#[test]
fn a_late_denial_builds_no_long_state() {
    let most = bounds::MAX_LOG_LIMIT;
    let log = Algorithm::SlidingWindowLog {
        limit: most,
        window: DAY,
    };
    let lease = Algorithm::Concurrency {
        limit: most,
        lease: DAY,
    };
    let hourly = Algorithm::Gcra {
        rate: Rate {
            count: 1,
            period: Span::from_secs(3_600),
        },
        burst: 0,
    };
    for long in [log, lease] {
        let entries = most - 1_000;
        let exhausted = limits(std::slice::from_ref(&hourly), false);
        let exhausted = charge(&exhausted, b"exhausted", 1);
        // There are several charges. The last charge denies the request.
        let alone = limits(std::slice::from_ref(&long), false);
        let mut bench = Bench::new();
        filled(&mut bench, &alone, entries);
        bench.ask(&[exhausted], Effect::Charge, Decision::Admitted);
        let charges = [charge(&alone, b"key", 1), exhausted];
        let denied = bench.ask(&charges, Effect::Charge, Decision::Limited);
        let peeked = bench.ask(&charges, Effect::Peek, Decision::Limited);
        costs_a_peek(denied, peeked);

        // One charge has several limits. The last limit denies the request.
        let both = limits(&[long, hourly.clone()], false);
        let both = charge(&both, b"key", 1);
        let states = bench.value();
        let mut value = crate::encode::head(&both);
        value.extend_from_slice(&states[crate::encode::head(&charges[0]).len()..]);
        let arrival = (bench.now + 3_600_000_000).to_be_bytes();
        value.extend_from_slice(&arrival[1..]);
        value.push(crate::lead::lead_of(3_600_000_000));
        let key = bench.store.key(b"key");
        bench.machine.keys.lock().unwrap().insert(key, value);
        let denied = bench.ask(&[both], Effect::Charge, Decision::Limited);
        let peeked = bench.ask(&[both], Effect::Peek, Decision::Limited);
        costs_a_peek(denied, peeked);
        // When the last limit also admits the request, the long state is charged.
        bench.pass(3_600_000_000);
        bench.ask(&[both], Effect::Charge, Decision::Admitted);
        assert!(bench.value().len() as u64 > 10 * entries);
    }
}

fn costs_a_peek(denied: Work, peeked: Work) {
    assert!(
        denied.instructions <= peeked.instructions + 100,
        "{denied:?} {peeked:?}"
    );
    assert!(
        denied.bytes <= peeked.bytes + 2_000,
        "{denied:?} {peeked:?}"
    );
}

/// The limits of a key change. The next request converts the state, and records the conversion in a
/// ledger. After the conversion, each decision again takes one call, and no reply contains a copy
/// of a log.
#[test]
fn a_converted_key_is_decided_in_one_call() {
    let gcra = |count, burst| Algorithm::Gcra {
        rate: Rate { count, period: DAY },
        burst,
    };
    let log = |window| Algorithm::SlidingWindowLog {
        limit: bounds::MAX_LOG_LIMIT,
        window,
    };
    let hour = Span::from_secs(3_600);
    for (old, new, entries) in [
        (vec![gcra(100, 99)], vec![gcra(90, 99)], 0),
        (vec![gcra(100, 99)], vec![gcra(90, 99), gcra(80, 99)], 0),
        (vec![log(DAY)], vec![log(DAY), log(hour)], 100),
        (vec![log(DAY)], vec![log(DAY), log(hour)], 50_000),
        (vec![log(DAY)], vec![gcra(100, 99)], 20),
    ] {
        let (old, new) = (limits(&old, false), limits(&new, false));
        let mut bench = Bench::new();
        if entries > 0 {
            filled(&mut bench, &old, entries);
        }
        let before = charge(&old, b"key", 1);
        bench.ask(&[before], Effect::Charge, Decision::Admitted);
        let after = charge(&new, b"key", 1);
        bench.ask(&[after], Effect::Charge, Decision::Admitted);
        let ledger = crate::decode::stored_value(b"key", &bench.value())
            .unwrap()
            .ledger;
        assert!(!ledger.is_empty(), "{new:?}");
        for _ in 0..3 {
            bench.pass(1_000);
            let (decision, calls, work) = bench.calls_of(after);
            assert_eq!((decision, calls), (Decision::Admitted, 1), "{new:?}");
            assert!(work.reply_bytes < 200, "{new:?}: {work:?}");
            assert!(work.bytes < 20_000, "{new:?}: {work:?}");
            let found = crate::decode::stored_value(b"key", &bench.value()).unwrap();
            assert_eq!(found.ledger, ledger, "{new:?}");
        }
        // A denied request changes nothing, and takes one call.
        let (value, whole) = (bench.value(), charge(&new, b"key", bounds::MAX_LOG_LIMIT));
        let (decision, calls, _) = bench.calls_of(whole);
        assert_eq!((decision, calls), (Decision::Limited, 1), "{new:?}");
        assert_eq!(bench.value(), value, "{new:?}");
        // After the ledger has expired, the next call writes the value without a ledger.
        bench.pass(2 * DAY.as_micros());
        let (decision, calls, _) = bench.calls_of(after);
        assert_eq!((decision, calls), (Decision::Admitted, 1), "{new:?}");
        let found = crate::decode::stored_value(b"key", &bench.value()).unwrap();
        assert!(found.ledger.is_empty(), "{new:?}");
    }
}

/// A server with other limits charges the key before each call, so that every conversion is
/// outdated. After eight tries the request is denied. The decision does not fall back to this
/// server's share of the limits.
#[test]
fn a_charge_that_is_always_overtaken_is_denied() {
    let hourly = |count| {
        let rate = Rate {
            count,
            period: Span::from_secs(3_600),
        };
        limits(&[Algorithm::Gcra { rate, burst: 99 }], false)
    };
    let (other, own) = (hourly(100), hourly(50));
    let bench = Bench::new();
    let values = [(); 2].map(|()| {
        let charge = charge(&other, b"key", 1);
        bench.ask(&[charge], Effect::Charge, Decision::Admitted);
        bench.value()
    });
    let key = bench.store.key(b"key");
    *bench.machine.written_by_others.lock().unwrap() = Some(Overwrite { key, values });
    let (decision, calls, _) = bench.calls_of(charge(&own, b"key", 1));
    assert_eq!(decision, crate::store::CONTENDED);
    assert!(
        calls >= crate::store::MAX_TRIES.try_into().unwrap(),
        "{calls}"
    );
    *bench.machine.written_by_others.lock().unwrap() = None;
    let (decision, ..) = bench.calls_of(charge(&own, b"key", 1));
    assert_eq!(decision, Decision::Admitted);
}

/// Each of 1,000 sub-windows counts one request. Later, all but one of the sub-windows have
/// expired.
#[test]
fn the_maximum_of_buckets_is_scanned_once_per_decision() {
    let counter = Algorithm::SlidingWindowCounter {
        limit: 1_000,
        window: Span::from_secs(1_000),
        counting: Counting::Buckets {
            buckets: bounds::MAX_BUCKETS,
            strict: true,
        },
    };
    for count_denied in [false, true] {
        let (mut bench, limits) = (
            Bench::new(),
            limits(std::slice::from_ref(&counter), count_denied),
        );
        for _ in 0..1_000 {
            bench.ask(
                &[charge(&limits, b"key", 1)],
                Effect::Charge,
                Decision::Admitted,
            );
            bench.pass(1_000_000);
        }
        let full = bench.ask(
            &[charge(&limits, b"key", 2)],
            Effect::Charge,
            Decision::Limited,
        );
        let whole = charge(&limits, b"key", 1_000);
        bench.pass(999_000_000 - 1_000_000);
        let passed = bench.ask(&[whole], Effect::Charge, Decision::Limited);
        for work in [full, passed] {
            assert!(work.instructions < 20_000, "{work:?}");
            assert!(work.bytes < 100_000, "{work:?}");
        }
    }
}

/// A request with 64 charges costs at most 64 times as much work as a request with one charge.
#[test]
fn charges_cost_the_same_up_to_the_maximum() {
    for algorithm in every_kind() {
        // No single-key script supports the combination of a sliding window log with sub-windows.
        let others = every_kind();
        let limits = limits(
            &[algorithm.clone(), others[5].clone(), others[8].clone()],
            false,
        );
        let (bench, keys) = (
            Bench::new(),
            (0..bounds::MAX_CHARGES).map(|key| key.to_string()),
        );
        let keys: Vec<String> = keys.collect();
        let charges: Vec<Charge<'_>> = keys
            .iter()
            .map(|key| charge(&limits, key.as_bytes(), 1))
            .collect();
        bench.ask(&charges, Effect::Charge, Decision::Admitted);
        let one = bench.ask(&charges[..1], Effect::Charge, Decision::Admitted);
        let all = bench.ask(&charges, Effect::Charge, Decision::Admitted);
        let most = bounds::MAX_CHARGES as u64;
        assert!(
            all.instructions <= most * one.instructions,
            "{algorithm:?}: {all:?} {one:?}"
        );
        assert!(
            all.bytes <= most * one.bytes,
            "{algorithm:?}: {all:?} {one:?}"
        );
    }
}

/// To reserve, renew and settle 64 charges costs at most 64 times as much as for one charge.
#[test]
fn reservations_cost_the_same_up_to_the_maximum() {
    for algorithm in every_kind() {
        let limits = limits(std::slice::from_ref(&algorithm), false);
        let keys: Vec<String> = (0..bounds::MAX_CHARGES)
            .map(|key| key.to_string())
            .collect();
        let all: Vec<Charge<'_>> = keys
            .iter()
            .map(|key| charge(&limits, key.as_bytes(), 1))
            .collect();
        let work_of = |charges: &[Charge<'_>]| {
            let bench = Bench::new();
            let (mut receipt, reserved) = bench.reserve(charges);
            let renewed = limits
                .has_slots()
                .then(|| bench.renew(charges, &mut receipt));
            let settled = bench.settle(charges, receipt);
            [Some(reserved), renewed, Some(settled)]
        };
        let most = bounds::MAX_CHARGES as u64;
        for (one, all) in work_of(&all[..1]).into_iter().zip(work_of(&all)) {
            let (Some(one), Some(all)) = (one, all) else {
                continue;
            };
            assert!(
                all.instructions <= most * one.instructions && all.bytes <= most * one.bytes,
                "{algorithm:?}: {all:?} {one:?}"
            );
        }
    }
}

/// If n is the maximum number of limits, a decision with n limits costs at most n times as much as
/// a decision with a single limit.
#[test]
fn limits_cost_the_same_up_to_the_maximum() {
    for algorithm in every_kind() {
        let most = bounds::MAX_LIMITS_PER_RULE;
        let one = limits(std::slice::from_ref(&algorithm), true);
        let all = limits(&vec![algorithm.clone(); most], true);
        let bench = Bench::new();
        let [one, all] = [(&one, b"one"), (&all, b"all")].map(|(limits, key)| {
            let charge = charge(limits, key, 1);
            bench.ask(&[charge], Effect::Charge, Decision::Admitted);
            bench.ask(&[charge], Effect::Charge, Decision::Admitted)
        });
        let most = most as u64;
        assert!(
            all.instructions <= most * one.instructions,
            "{algorithm:?}: {all:?} {one:?}"
        );
        assert!(
            all.bytes <= most * one.bytes,
            "{algorithm:?}: {all:?} {one:?}"
        );
    }
}

/// Returns all sequences of up to [`MAX_MEMBERS`](super::MAX_MEMBERS) algorithms, of the kinds that
/// the fast path supports.
fn fast_sequences() -> Vec<Vec<Algorithm>> {
    let rate = |count, seconds| Rate {
        count,
        period: Span::from_secs(seconds),
    };
    let kinds = [
        Algorithm::Gcra {
            rate: rate(5, 60),
            burst: 4,
        },
        Algorithm::TokenBucket {
            capacity: 7,
            refill: rate(3, 30),
            mode: RefillMode::Interval,
        },
        Algorithm::FixedWindow {
            limit: 6,
            window: Window::Epoch(Span::from_secs(45)),
        },
        Algorithm::FixedWindow {
            limit: 9,
            window: Window::FirstRequest(Span::from_secs(80)),
        },
        Algorithm::SlidingWindowCounter {
            limit: 8,
            window: Span::from_secs(70),
            counting: Counting::Weighted,
        },
    ];
    let mut sequences = vec![Vec::new()];
    let mut begun = 0;
    for _ in 0..super::MAX_MEMBERS {
        let end = sequences.len();
        for at in begun..end {
            for kind in &kinds {
                let sequence: Vec<Algorithm> =
                    sequences[at].iter().chain([kind]).cloned().collect();
                sequences.push(sequence);
            }
        }
        begun = end;
    }
    sequences.split_off(1)
}

/// The fast path and `check` make the same decisions for the same requests. The test calls `check`
/// with reservations, because the fast path does not support reservations. The fast path can read
/// the values that `check` has written, and `check` can read those of the fast path.
#[test]
fn the_fast_path_decides_as_check_does() {
    let (mut fast, mut general) = (Bench::new(), Bench::new());
    // The requests come from a linear congruential generator, so that failures are reproducible.
    let mut seed = 1_u64;
    let mut draw = |below: u64| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (seed >> 33) % below
    };
    let (mut admitted, mut denied) = (0, 0);
    for (number, sequence) in fast_sequences().into_iter().enumerate() {
        let (limits, key) = (limits(&sequence, false), number.to_string());
        for step in 0..12 {
            let charge = charge(&limits, key.as_bytes(), 1 + draw(3));
            let charges = [charge];
            let (mut outcomes, mut expected) = (Vec::new(), Vec::new());
            // In the last steps, each store continues with the state that the other store has
            // written.
            let (one, other) = if step < 9 {
                (&fast, &general)
            } else {
                (&general, &fast)
            };
            let decided = one.store.check(&charges, Effect::Charge, &mut outcomes);
            let decision = one.runtime.block_on(decided).unwrap();
            let reserved = other.store.reserve(&charges, &mut expected);
            let (reserved, _) = other.runtime.block_on(reserved).unwrap();
            assert_eq!(decision, reserved, "{sequence:?}");
            assert_eq!(outcomes, expected, "{sequence:?}");
            match decision {
                Decision::Admitted => admitted += 1,
                _ => denied += 1,
            }
            let passed = draw(20_000_000);
            fast.pass(passed);
            general.pass(passed);
        }
    }
    assert!(admitted > 1_000 && denied > 1_000, "{admitted} {denied}");
}

/// On the fast path, each decision takes one call. The work of the call is proportional to the
/// number of limits.
#[test]
fn a_limit_on_the_fast_path_costs_at_most_70_instructions() {
    let bench = Bench::new();
    for (number, sequence) in fast_sequences().into_iter().enumerate() {
        let (limits, key) = (limits(&sequence, false), number.to_string());
        let charge = charge(&limits, key.as_bytes(), 1);
        bench.ask(&[charge], Effect::Charge, Decision::Admitted);
        let (decision, calls, work) = bench.calls_of(charge);
        assert_eq!((decision, calls), (Decision::Admitted, 1));
        let most = 70 * (sequence.len() as u64 + 1);
        assert!(work.instructions <= most, "{sequence:?}: {work:?}");
    }
}

/// Fills a sliding window log or a concurrency limit with this number of entries, each of which has
/// a different instant. Returns the receipts of the first, the middle and the last entry.
fn filled(bench: &mut Bench, limits: &Limits, entries: u64) -> [RedisReceipt; 3] {
    let one = charge(limits, b"key", 1);
    // The entries and the receipts are written directly, in the store's format.
    let (first, every) = (bench.now, 1_000);
    let mut value = crate::encode::head(&one);
    let windows = limits.len();
    let mut put = |number: u64, bytes: usize| {
        value.extend_from_slice(&number.to_be_bytes()[8 - bytes..]);
    };
    let longest = limits
        .iter()
        .map(|limit| limit.window().as_micros())
        .max()
        .unwrap();
    put(longest, 7);
    put(entries, 4);
    put(windows as u64, 1);
    put(0, 3);
    for _ in 0..windows {
        put(0, 7);
        put(first, 7);
    }
    for entry in 0..entries {
        put(first + entry * every, 7);
        put(entry + 1, 3);
    }
    bench
        .machine
        .keys
        .lock()
        .unwrap()
        .insert(bench.store.key(b"key"), value);
    bench.pass((entries - 1) * every);
    let at = [0, entries / 2, entries - 1].map(|entry| first + entry * every);
    at.map(|at| {
        let mut receipt = vec![0x93, 0xCF];
        receipt.extend(at.to_be_bytes());
        receipt.push(0xA0);
        receipt.push(0xA7);
        receipt.extend(&at.to_be_bytes()[1..]);
        RedisReceipt {
            charges: vec![receipt],
            has_unknown_renewal: false,
        }
    })
}

/// In the longest log, a charge, a peek, a refund or a renewal at either end touches a few entries.
/// A refund or a renewal in the middle touches half of the entries.
#[test]
fn the_longest_log_is_rarely_rewritten() {
    let most = bounds::MAX_LOG_LIMIT;
    let log = Algorithm::SlidingWindowLog {
        limit: most,
        window: DAY,
    };
    let lease = Algorithm::Concurrency {
        limit: most,
        lease: DAY,
    };
    let whole = 10 * most;
    for (algorithm, count_denied) in [(log.clone(), false), (log, true), (lease, false)] {
        let limits = limits(std::slice::from_ref(&algorithm), count_denied);
        let one = charge(&limits, b"key", 1);
        let mut bench = Bench::new();
        filled(&mut bench, &limits, most - 1);
        let mut all = vec![
            ("peek", bench.ask(&[one], Effect::Peek, Decision::Admitted)),
            (
                "admitted",
                bench.ask(&[one], Effect::Charge, Decision::Admitted),
            ),
            (
                "denied",
                bench.ask(&[one], Effect::Charge, Decision::Limited),
            ),
        ];
        let large = charge(&limits, b"key", most);
        all.push((
            "a large cost denied",
            bench.ask(&[large], Effect::Charge, Decision::Limited),
        ));
        if !count_denied {
            for (at, position) in ["first", "middle", "last"].into_iter().enumerate() {
                let mut receipts = filled(&mut bench, &limits, most);
                all.push((
                    position,
                    bench.settle(&[one], std::mem::take(&mut receipts[at])),
                ));
                if limits.has_slots() {
                    let mut receipts = filled(&mut bench, &limits, most);
                    all.push((position, bench.renew(&[one], &mut receipts[at])));
                }
            }
        }
        for (what, work) in all {
            let middle = what == "middle";
            let instructions = if middle { 14 * most / 2 } else { 4_000 };
            assert!(
                work.instructions < instructions,
                "{algorithm:?} {what}: {work:?}"
            );
            // The whole log is read, sliced, concatenated and written.
            let bytes = if middle { 17 } else { 11 };
            assert!(work.bytes < bytes * whole, "{algorithm:?} {what}: {work:?}");
        }
    }
}

/// Runs the scripts that make no decisions, each with its largest input: 64 keys, a page of 1,000
/// blocks, 54 top-talker slices of a server, and 1,000 servers.
#[test]
fn the_scripts_that_decide_nothing_are_bounded() {
    const NOW: &str = "1767225600000000";
    let machine = Machine::new().unwrap();
    let words = |words: &[&str]| words.iter().map(|word| word.as_bytes().to_vec()).collect();
    let instructions = |script: &'static Script, keys: usize, args: Vec<Vec<u8>>| {
        let call = Call {
            script,
            keys: (0..keys).map(|key| key.to_string().into()).collect(),
            args,
            on_late_reply: None,
        };
        machine.run_one(&call).unwrap();
        machine.work.lock().unwrap().instructions
    };
    let many = |head: &[&str], word: &[&str], times: usize| -> Vec<Vec<u8>> {
        let mut args: Vec<Vec<u8>> = words(head);
        args.extend((0..times).flat_map(|_| -> Vec<Vec<u8>> { words(word) }));
        args
    };
    for (name, counted, most) in [
        ("read", instructions(&READ, 64, words(&[NOW])), 64 * 20),
        (
            "replace",
            instructions(&REPLACE, 64, many(&[], &["", "value", "9"], 64)),
            64 * 60,
        ),
        (
            "lifted blocks",
            instructions(&BLOCK_INDEX, 1, many(&[NOW, "9", "lifted"], &["key"], PAGE)),
            PAGE as u64 * 30,
        ),
        (
            "sweep of blocks",
            instructions(&BLOCK_INDEX, 1, words(&[NOW, "9", "sweep", "0"])),
            PAGE as u64 * 60,
        ),
        (
            "published slices",
            instructions(&TOP, 1, many(&["put", "9"], &["field", "slice"], 54)),
            54 * 40,
        ),
        (
            "read slices",
            instructions(&TOP, 1, many(&["get"], &["field"], 54)),
            100,
        ),
        (
            "list of servers",
            instructions(&TOP, 1, words(&["list", "id", "9", "1000"])),
            100,
        ),
        (
            "published denials",
            instructions(
                &DENIALS,
                1,
                many(&["put", "10000", "9", "0"], &["denial"], 200),
            ),
            200 * 40,
        ),
        (
            "read denials",
            instructions(&DENIALS, 1, words(&["get", "10000", "", "250"])),
            250 * 20,
        ),
        ("census", instructions(&CENSUS, 1, words(&["id", "9"])), 100),
    ] {
        assert!(counted <= most, "{name}: {counted} instructions");
    }
}
