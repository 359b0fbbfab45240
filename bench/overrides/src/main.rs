//! Measures decisions with and without a million overrides in the same run, and the memory per
//! override.
//!
//! Each round decides the same 1,000,000 requests on 10,000 keys with three rule sets: without
//! overrides, with 1,000,000 overrides for other keys, and with 1,000,000 overrides, one of them
//! for each requested key. The time of a decision includes looking up the rules. The times are
//! medians over the rounds.
//!
//! An argument sets the number of keys.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    hint::black_box,
    sync::atomic::{AtomicUsize, Ordering},
    time::Instant,
};

use tidegate_core::{
    Cost, Effect, Limit, MemoryBounds, MemoryStore, Override, OverrideTarget, Overrides,
    Replacement, Request, Rule, RuleSet, Scratch, Timestamp, bounds::MAX_OVERRIDES,
};

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
    name: &'static str,
    rules: RuleSet,
    store: MemoryStore,
    nanos: Vec<f64>,
}

impl Subject {
    fn new(name: &'static str, overrides: &Overrides) -> Self {
        let limit: Limit = "1000000/s burst 1000000".parse().expect("a limit");
        let rule = Rule::new("api", vec![limit]).expect("a rule");
        let rule = rule.keyed_by(&["customer"]).expect("a key");
        let rules = RuleSet::build(vec![rule], Vec::new()).expect("rules");
        Self {
            name,
            rules: rules.with_overrides(overrides),
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
            let entries = [("customer", key.as_str())];
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

fn set(overrides: &Overrides, key: &str) {
    let new = Override {
        replacement: Replacement::Limits(Box::new(["2000000/s burst 1000000".into()])),
        until: None,
        reason: "launch".into(),
    };
    let target = OverrideTarget::of(&[key]);
    overrides
        .set("api", &target, new, NOW)
        .expect("room for the override");
}

fn main() {
    let keys = std::env::args().nth(1);
    let keys: usize = keys.map_or(10_000, |keys| keys.parse().expect("the number of keys"));
    let keys: Vec<String> = (0..keys)
        .map(|number| format!("customer-{number:07}"))
        .collect();
    let (none, others, used) = (
        Overrides::default(),
        Overrides::default(),
        Overrides::default(),
    );
    let before = ALLOCATED.load(Ordering::Relaxed);
    for number in 0..MAX_OVERRIDES {
        set(&others, &format!("customer-{:07}", keys.len() + number));
    }
    let bytes = (ALLOCATED.load(Ordering::Relaxed) - before) as f64 / MAX_OVERRIDES as f64;
    for number in 0..MAX_OVERRIDES {
        set(&used, &format!("customer-{number:07}"));
    }
    let mut subjects = [
        Subject::new("no overrides", &none),
        Subject::new("1,000,000 overrides of other keys", &others),
        Subject::new("1,000,000 overrides, one of them of each key", &used),
    ];
    for _ in 0..ROUNDS {
        subjects.iter_mut().for_each(|subject| subject.run(&keys));
    }
    let base = subjects[0].median();
    println!("| rules | ns per decision | ratio |");
    println!("| --- | --- | --- |");
    for subject in &mut subjects {
        let median = subject.median();
        println!("| {} | {median:.1} | {:.2} |", subject.name, median / base);
    }
    println!();
    println!("An override takes {bytes:.0} bytes, with keys of 16 bytes and a reason of 6 bytes.");
}
