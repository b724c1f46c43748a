// Error bounds of tangents from the largest values that can occur: a coarse version of conformance/tangent_bounds.py, as
// ErrorBounds is of conformance/error_bounds.py. Sums of P over the keys of a row are at most 1, so rows of T P have T.
#pragma once

#include "check.h"

namespace fuzz {

// The largest magnitudes of the tangents of the inputs; 0 if they do not move.
struct TangentMagnitudes {
    double q, k, v, bias, sink, dout, dlse;
};

struct TangentBounds {
    double tout, tlse, delta, tdelta, tdq, tdk, tdv, tds;  // absolute parts; tds as ErrorBounds::ds

    TangentBounds(const Rounding& r, const Magnitudes& m, const ErrorBounds& primal, const TangentMagnitudes& t) {
        const double scale = std::fabs(m.scale), longest = m.rows > m.keys ? m.rows : m.keys;
        const double keys = r.sum(m.keys), channels = r.sum(m.head_dim_v);
        const double product = scale * m.head_dim * m.q * m.k;
        const double most = 1e100;                                     // no bound is infinite: it may be multiplied by 0
        const double p = std::fmin(std::expm1(2 * primal.lse), most);  // of a probability, relative
        const double e_o = std::fmin(primal.o, most), e_ds = std::fmin(primal.ds, most);

        // The scores: their tangents, and the slope of the softcap and its tangent.
        const double tz = scale * m.head_dim * (t.q * m.k + m.q * t.k), e_tz = r.sum(m.head_dim) * tz;
        const double e_th = m.softcap > 0 ? std::fmin(1, r.sum(m.head_dim) * product / m.softcap + r.sums) : 0;
        const double e_g = m.softcap > 0 ? std::fmin(1, 2 * e_th + 4 * r.sums) : 0;
        const double tg = m.softcap > 0 ? 2 * tz / m.softcap : 0;
        const double e_tg = m.softcap > 0 ? 2 / m.softcap * ((e_th + e_g) * (tz + e_tz) + e_tz) : 0;
        const double ts = tz + t.bias + t.sink, far = 4 * ts;  // |ts - mu| + |ts - pivot|
        const double e_ts = e_tz + e_g * (tz + e_tz) + r.sums * ts;
        const double e_mu = (2 * p + 2 * keys) * far + e_ts;

        const double weights = (2 * r.u + keys + p) * far + e_ts + e_mu;  // of P (ts - mu), summed over a row
        tout = m.keep * (weights * m.v + (r.u + keys + p) * t.v) + 2 * ts * e_o + r.tiny * m.keys * m.keep * (far * m.v + t.v) +
               r.tiny;
        tlse = e_mu + keys * ts;

        const double dp = m.keep * m.head_dim_v * m.dout * m.v, ds = 2 * dp + m.dlse;
        const double tdp = m.keep * m.head_dim_v * (t.dout * m.v + m.dout * t.v);
        const double tdelta_most = m.head_dim_v * m.keep * (t.dout * m.v + m.dout * (far * m.v + t.v)) + t.dlse;
        delta = m.head_dim_v * m.dout * e_o + channels * dp + r.sums * (dp + m.dlse);
        tdelta = m.head_dim_v * (t.dout * e_o + m.dout * tout) + channels * tdelta_most + r.sums * t.dlse;
        const double tds_most = far * ds + tdp + tdelta_most;
        const double e_dp = channels * ds, e_tdp = channels * (tdp + tdelta_most) + r.sums * t.dlse;
        const double a = (p + 2 * r.u + 2 * r.sums) * tds_most + (e_ts + e_mu) * ds + far * e_dp + e_tdp;
        tds = a + (r.u + r.sum(longest)) * tds_most + r.tiny * longest * (1 + tds_most);

        const double tdz_most = tg * ds + tds_most, dz = e_ds + e_g * ds;
        const double tdz = (r.u + r.sum(longest)) * tdz_most + e_tg * (ds + e_ds) + tg * e_ds + (1 + e_g) * tds + e_g * tds_most +
                           r.tiny * longest;
        const double rows = m.rows * m.group;
        tdq = scale * (tdz * m.k + dz * t.k) + r.tiny;
        tdk = scale * rows * (tdz * m.q + dz * t.q) + r.tiny;
        tdv = rows * m.keep *
                  (((2 * r.u + r.sum(m.rows) + p) * far + e_ts + e_mu) * m.dout + (r.u + r.sum(m.rows) + p) * t.dout +
                   r.tiny * (1 + far)) +
              r.tiny;
    }
};

}  // namespace fuzz
