"""What a private training run costs, and what a budget buys. Runs in seconds: python examples/accounting.py"""

from hush.accounting import (
    Budget,
    Filter,
    Gaussian,
    MomentsAccountant,
    PoissonSampled,
    calibrate,
    epsilon,
    grouped,
    rounded_up,
)

print("Training is still to come; this is the accountant's example.")

# One lot of the paper's running example: every example enters with probability 0.01, noise multiplier 4.
step = PoissonSampled(0.01, Gaussian(4.0))
run = step * 10_000

print("\n100 epochs at rate 0.01 and noise 4, delta = 1e-5:")
for accountant in ("strong-paper", "strong", "moments", "renyi", "pld"):
    remark = "  (as the paper computes it; not a valid bound)" if accountant == "strong-paper" else ""
    print(f"  {accountant:<13} epsilon {epsilon(run, delta=1e-5, accountant=accountant)}{remark}")

# A budget buys noise, or steps; part of it may be spent already, here by a private PCA.
budget, pca = Budget(epsilon=2.0, delta=1e-5), Gaussian(16.0)
noise = calibrate.noise(lambda sigma: PoissonSampled(0.01, Gaussian(sigma)) * 10_000, budget, spent=pca)
steps = calibrate.steps(lambda n: step * n, budget, spent=pca)
print(f"\nAfter a PCA with noise 16, epsilon 2 buys 10,000 lots at noise {rounded_up(noise)},")
print(f"or {steps} lots at noise 4.")

# The same run, seen by a family of three correlated records.
family = epsilon(grouped(run, 3), delta=1e-5, accountant="renyi")
print(f"\nFor a group of three records the run costs epsilon {family}.")

# The paper's accountant by hand: charge before use, ask at any time.
by_hand = MomentsAccountant()
for _ in range(100):
    by_hand.accumulate(step * 100)
print(f"\nThe moments accountant after 100 epochs: epsilon {rounded_up(by_hand.epsilon(delta=1e-5))}.")

# Where noise or steps are chosen during the run, a filter guards a cap fixed in advance.
cap = Filter(budget)
lots = 0
while cap.affords(step * 500):
    cap.charge(step * 500)
    lots += 500
print(f"\nA filter with the same budget let {lots} lots through before it refused; the price of freedom to adapt.")
