//! Measures decisions with and without blocks by entries in the same run, and the memory per block.
//!
//! Each round decides the same 1,000,000 requests from 10,000 addresses with four rule sets:
//! without blocks, with the maximum number of blocks of other addresses, with blocks of other
//! networks in the maximum number of forms, and with a block of a network that denies all requests.
//! The time of a decision includes looking up the rules. The times are medians over the rounds.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    hint::black_box,
    net::Ipv4Addr,
    sync::atomic::{AtomicUsize, Ordering},
    time::Instant,
};

use tidegate_core::{
    Cost, Effect, EntryBlock, EntryBlockTarget, EntryBlocks, Limit, MemoryBounds, MemoryStore,
    Request, Rule, RuleSet, Scratch, Timestamp,
    bounds::{MAX_ENTRY_BLOCK_FORMS, MAX_ENTRY_BLOCKS},
};

const KEYS: u32 = 10_000;
const REQUESTS: usize = 1_000_000;
const ROUNDS: usize = 15;
const NOW: Timestamp = Timestamp::from_micros(1_700_000_000_000_000);

/// An allocator that counts the allocated bytes.
struct Counting;

static ALLOCATED: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is forwarded to the system allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATED.fetch_add(layout.size(), Ordering::Relaxed);
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        ALLOCATED.fetch_sub(layout.size(), Ordering::Relaxed);
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

struct Subject {
    name: String,
    rules: RuleSet,
    store: MemoryStore,
    nanos: Vec<f64>,
}

impl Subject {
    fn new(name: impl Into<String>, blocks: &EntryBlocks) -> Self {
        let limit: Limit = "1000000/s burst 1000000".parse().expect("a limit");
        let rule = Rule::new("each", vec![limit]).expect("a rule");
        let rule = rule.keyed_by(&["ip"]).expect("a key");
        let rules = RuleSet::build(vec![rule], Vec::new()).expect("rules");
        Self {
            name: name.into(),
            rules: rules.with_entry_blocks(blocks),
            store: MemoryStore::new(MemoryBounds::default()),
            nanos: Vec::new(),
        }
    }

    fn run(&mut self, keys: &[String]) {
        let (mut scratch, mut outcomes) = (Scratch::default(), Vec::new());
        let began = Instant::now();
        for number in 0..REQUESTS {
            // The step is large, so that consecutive keys are far apart, and coprime to the number
            // of keys, so that all keys are visited.
            let key = &keys[number * 7_919 % keys.len()];
            let entries = [("ip", key.as_str())];
            let request = Request::new(&entries, Cost::ONE).expect("a request");
            let charges = self
                .rules
                .charges(&request, NOW, &mut scratch)
                .expect("charges");
            black_box(
                self.store
                    .check(&charges, NOW, Effect::Charge, &mut outcomes),
            );
        }
        self.nanos
            .push(began.elapsed().as_secs_f64() * 1e9 / REQUESTS as f64);
    }

    fn median(&mut self) -> f64 {
        self.nanos.sort_by(f64::total_cmp);
        self.nanos[self.nanos.len() / 2]
    }
}

fn set(blocks: &EntryBlocks, value: &str) {
    let block = EntryBlock {
        until: None,
        reason: "attack".into(),
    };
    let target = EntryBlockTarget::new(None, &[("ip", value)]).expect("a target");
    blocks.set(&target, block, NOW).expect("room for the block");
}

fn main() {
    let address = |number: u32| Ipv4Addr::from_bits(0x0A00_0000 + number).to_string();
    let keys: Vec<String> = (0..KEYS).map(address).collect();
    let [none, others, forms, network] = [(); 4].map(|()| EntryBlocks::default());
    let before = ALLOCATED.load(Ordering::Relaxed);
    for number in 0..MAX_ENTRY_BLOCKS as u32 {
        set(&others, &address(0x0100_0000 + number));
    }
    let bytes = (ALLOCATED.load(Ordering::Relaxed) - before) as f64 / MAX_ENTRY_BLOCKS as f64;
    // The prefixes of IPv4 come first, because the requests have IPv4 addresses.
    for form in 0..MAX_ENTRY_BLOCK_FORMS {
        match form {
            0..25 => set(&forms, &format!("192.0.0.0/{}", 8 + form)),
            _ => set(&forms, &format!("2001:db8::/{}", 32 + form)),
        }
    }
    set(&network, "10.0.0.0/8");
    let mut subjects = [
        Subject::new("no blocks", &none),
        Subject::new(format!("{MAX_ENTRY_BLOCKS} other addresses"), &others),
        Subject::new("other networks, 25 prefixes of IPv4 and 39 of IPv6", &forms),
        Subject::new("a network with all addresses", &network),
    ];
    for _ in 0..ROUNDS {
        subjects.iter_mut().for_each(|subject| subject.run(&keys));
    }
    let base = subjects[0].median();
    println!("| blocks | ns per decision | ratio |");
    println!("| --- | --- | --- |");
    for subject in &mut subjects {
        let median = subject.median();
        println!("| {} | {median:.1} | {:.2} |", subject.name, median / base);
    }
    println!();
    println!("A block takes {bytes:.0} bytes, with an address and a reason of 6 bytes.");
}
