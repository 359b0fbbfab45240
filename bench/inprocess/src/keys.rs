//! The keys and their order, which are the same for every limiter and in every run.

/// Returns `count` keys of 13 bytes.
pub fn keys(count: usize) -> Vec<String> {
    (0..count).map(key).collect()
}

/// Returns the key with this number. It has 13 bytes if there are fewer than 10^8 keys.
pub fn key(number: usize) -> String {
    format!("user:{number:08}")
}

/// Returns `times` copies of every index below `keys`, in random order.
pub fn shuffled(keys: usize, times: usize, seed: u64) -> Vec<u32> {
    let keys = u32::try_from(keys).expect("there are fewer than 2^32 keys");
    let mut order: Vec<u32> = (0..times).flat_map(|_| 0..keys).collect();
    let mut random = SplitMix(seed);
    for last in (1..order.len()).rev() {
        order.swap(last, random.below(last + 1));
    }
    order
}

/// Vigna's random number generator SplitMix64. It needs no dependency and gives the same numbers on
/// all platforms.
struct SplitMix(u64);

impl SplitMix {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, bound: usize) -> usize {
        let wide = u128::from(self.next()) * bound as u128;
        usize::try_from(wide >> 64).expect("less than the bound")
    }
}
