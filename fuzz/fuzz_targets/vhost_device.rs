#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| blkq_fuzz::vhost_device::check(input));
