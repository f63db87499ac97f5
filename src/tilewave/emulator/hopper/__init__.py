"""What Hopper adds: mbarriers, bulk copies, warpgroup products, clusters, warps that go their own ways."""
