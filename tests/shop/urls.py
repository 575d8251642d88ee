from functools import partial

from django.urls import path

from . import views

urlpatterns = [
    path("pay/<int:pk>/", views.pay),
    path("touch/<int:pk>/", views.touch),
    path("pay-under-two-locks/<int:pk>/", views.pay_under_two_locks),
    path("pay-class-and-method/<int:pk>/", views.PayByClassAndMethod.as_view()),
    path("pay-part/<int:pk>/", partial(views.pay)),
    path("apay/<int:pk>/", views.apay),
    path("busy-inside/", views.busy_inside),
    path("abusy-inside/", views.abusy_inside),
    path("stream/<int:pk>/", views.stream),
    path("astream/<int:pk>/", views.astream),
]
