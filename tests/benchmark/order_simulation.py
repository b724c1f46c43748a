"""Expected cost of a fixed order of the additions to dq: times of a greedy simulation, relative to the free order."""
import heapq
L2 = 24e6
def groups(all_heads, head_bytes):
    fit = max(1, min(all_heads, int(L2 / head_bytes)))
    g = fit
    while 2 * g >= fit and fit - g < 64:
        if all_heads % g == 0: return g
        g -= 1
    return fit
def run(S, d, causal, mode, P, poll=900, add=1500, sms=132, tokens=16384, width=2048):
    n = 64 if d > 128 else 128
    heads = tokens // S * (width // d)
    N, T = S // n, S // 64
    H = groups(heads, S * (2 * 2 * d + 4 * d))
    order, visits = mode
    free = [0.0] * sms; heapq.heapify(free)
    start_cost, end_cost = 2500, 2500
    done = {}
    end = 0
    for first in range(0, heads, H):
        hs = range(first, min(first + H, heads))
        for tile in (range(N) if order in ("free", "up") else range(N - 1, -1, -1)):
            for h in hs:
                t0 = heapq.heappop(free)
                ready = t0 + start_cost
                lo = tile * n // 64 if causal else 0
                ms = range(lo, T) if visits == "up" else range(T - 1, lo - 1, -1)
                dn = done.setdefault(h, [0.0] * T)
                for m in ms:
                    ready += P
                    if order != "free":
                        at = max(ready, dn[m] + poll)
                        dn[m] = at + add
                        ready = max(ready, at - P)   # the two stages of dS hide about a tile
                t1 = max(ready, dn[ms[-1]] if order != "free" else 0) + end_cost
                end = max(end, t1)
                heapq.heappush(free, t1)
    return end
Ps = {64: 2150, 128: 3700, 256: 5300}
import sys
for d in (64, 128, 256):
    for causal in (0, 1):
        row = []
        for S in (512, 1024, 2048, 4096, 8192, 16384):
            base = run(S, d, causal, ("free", "up"), Ps[d])
            row.append(" ".join(f"{run(S, d, causal, m, Ps[d])/base:.3f}" for m in (("up","up"),("up","down"),("down","up"))))
        print(d, "causal" if causal else "full", " | ".join(row), flush=True)
